"""Merged adapters compute what peft computes. An adapter that cannot be merged is refused in one
line."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from rounding import assert_differ_by_rounding
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cachetree.errors import ConfigError
from profiles.adapters import LoraConfig as Stated
from profiles.adapters import merged, read_config, with_adapter
from tools.merge import merge_folder

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
IDS = torch.arange(3, 40)[None]


def write_base(folder: Path, family: str, shard: str = "1GB", **changes: Any) -> Path:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    if family == "mixtral":
        sizes["num_local_experts"] = 3
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def write_adapter(base: Path, folder: Path, config: Any = None, **settings: Any) -> Path:
    """Write an adapter as peft saves it. All weights that can be trained are random."""
    config = config or LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | settings
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def edit_config(adapter: Path, **changes: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapter


@torch.no_grad()
def assert_merged_as_peft_does(base: Path, adapter: Path, out: Path) -> None:
    """Compare the merged folder, as transformers loads it, with peft's own unmerged adapter."""
    merge_folder(base, adapter, out)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain(IDS).logits
    expected = PeftModel.from_pretrained(plain, adapter)(IDS).logits
    result = AutoModelForCausalLM.from_pretrained(out)(IDS).logits
    assert torch.allclose(result, expected, atol=2e-4)
    assert not torch.allclose(result, before, atol=1e-1)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all-linear"),
        ("mistral", ["q_proj", "v_proj"]),
        ("qwen2", "all-linear"),
        ("qwen3", "all-linear"),
        ("phi3", FUSED),
        ("mixtral", ATTENTION),
    ],
)
def test_every_family_is_merged_as_peft_does(family, targets, tmp_path):
    base = write_base(tmp_path / "base", family)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=targets)
    assert_merged_as_peft_does(base, adapter, tmp_path / "out")


SETTINGS: dict[str, dict[str, Any]] = {
    "transposed": {"fan_in_fan_out": True},
    "one layer": {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
    "factors of the ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_every_setting_is_merged_as_peft_does(settings, tmp_path):
    base = write_base(tmp_path / "base", "qwen2")
    adapter = write_adapter(base, tmp_path / "adapter", **settings)
    assert_merged_as_peft_does(base, adapter, tmp_path / "out")


def test_shards_stay_as_they_are_cut(tmp_path):
    base = write_base(tmp_path / "base", "llama", shard="20KB")
    names = sorted(file.name for file in base.iterdir())
    assert "model.safetensors.index.json" in names and len(names) > 5
    adapter = write_adapter(base, tmp_path / "adapter")
    assert_merged_as_peft_does(base, adapter, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    for file in base.glob("*.safetensors"):
        assert load_file(file).keys() == load_file(tmp_path / "out" / file.name).keys()


def test_tied_embeddings_stay_tied(tmp_path):
    base = write_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapter = write_adapter(base, tmp_path / "adapter")
    assert_merged_as_peft_does(base, adapter, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_change_of_tied_embeddings_is_refused(module, tmp_path):
    base = write_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=[module])
    with pytest.raises(ConfigError, match=r"adapter .* one tensor; merge it with peft"):
        merge_folder(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="one tensor"):
        merge_folder(base, adapter, tmp_path / "out")


def test_experts_by_their_old_names_are_merged_as_peft_does(tmp_path):
    """Adapters that transformers 4 saved use these names, and the files of mixtral still do."""
    base = write_base(tmp_path / "base", "mixtral")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=ATTENTION)
    edit_config(adapter, target_modules=["w1", "w2", "w3"])
    factors, shapes = {}, {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    for layer in range(NUM_LAYERS):
        for expert in range(3):
            for name, (rows, columns) in shapes.items():
                module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                factors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, columns)
                factors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 4) / 10
    save_file(factors, adapter / "adapter_model.safetensors")
    assert_merged_as_peft_does(base, adapter, tmp_path / "out")


def test_stacked_experts_are_refused(tmp_path):
    base = write_base(tmp_path / "base", "mixtral")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_adapter(
        base, tmp_path / "adapter", target_modules=[], target_parameters=parameters
    )
    with pytest.raises(ConfigError, match=r"has target_parameters = \['mlp.*merge it with peft"):
        read_config(adapter)


@pytest.mark.parametrize(
    "setting",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
    ],
    ids=str,
)
def test_adapter_that_sglang_would_apply_differently_is_refused(plain, setting, tmp_path):
    adapter = write_adapter(plain[0], tmp_path / "adapter", target_modules=["q_proj"], **setting)
    ((key, value),) = setting.items()
    cause = f"{adapter}/adapter_config.json has {key} = {value!r}, and SGLang applies lora_alpha"
    with pytest.raises(ConfigError, match=f"{re.escape(cause)}.* merge it .* serve the result"):
        read_config(adapter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (IA3Config(task_type="CAUSAL_LM"), "has peft_type = 'IA3'"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "has use_dora = True"),
        (
            LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
            "has init_lora_weights = 'pissa'",
        ),
        (
            LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
            r"has trainable_token_indices = \[3, 4\]",
        ),
        (
            LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]),
            r"has layer_replication = \[\[0, 2\], \[1, 2\]\]",
        ),
    ],
    ids=["IA3", "DoRA", "PiSSA", "tokens", "replication"],
)
def test_other_variants_are_refused(config, message, tmp_path):
    base = write_base(tmp_path / "base", "llama")
    adapter = write_adapter(base, tmp_path / "adapter", config)
    with pytest.raises(ConfigError, match=f"{tmp_path}/adapter/adapter_config.json {message}"):
        merge_folder(base, adapter, tmp_path / "out")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Path]:
    """Write a base and an adapter on it."""
    folder = tmp_path_factory.mktemp("plain")
    base = write_base(folder / "base", "llama")
    return base, write_adapter(base, folder / "adapter")


@pytest.fixture
def adapter(plain, tmp_path: Path) -> Path:
    """Return a copy of the adapter that a test may break."""
    return Path(shutil.copytree(plain[1], tmp_path / "adapter"))


def test_a_setting_of_later_is_refused(adapter):
    read_config(edit_config(adapter, a_setting_of_later=None))
    with pytest.raises(ConfigError, match="has a_setting_of_later = 3"):
        read_config(edit_config(adapter, a_setting_of_later=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 5}, "factors of rank 4 and the config says 5"),
        ({"lora_alpha": None}, "not a LoRA adapter's config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(plain, adapter, changes, message):
    base = load_file(plain[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        with_adapter(base, edit_config(adapter, **changes))


def test_another_base_is_refused(plain, tmp_path):
    for name, changes in {
        "lacks": {"num_hidden_layers": NUM_LAYERS - 1},
        "the base's of": {"intermediate_size": 64},
    }.items():
        base = write_base(tmp_path / name, "llama", **changes)
        with pytest.raises(ConfigError, match=rf"adapter .*{name}.*base that it was trained on"):
            merge_folder(base, plain[1], tmp_path / "out")


def test_broken_files_are_named(plain, adapter):
    base = load_file(plain[0] / "model.safetensors")
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, weights)
    with pytest.raises(ConfigError, match=r"lora_B.weight of model\.layers.* is missing"):
        with_adapter(base, adapter)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors cannot be read"):
        with_adapter(base, adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a LoRA adapter's config"):
        read_config(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read"):
        read_config(adapter)


def test_sums_are_made_in_float32_and_rounded_once():
    torch.manual_seed(0)
    base = {"m.weight": torch.randn(8, 8), "other.weight": torch.randn(3)}
    factors = {"m.lora_A.weight": torch.randn(2, 8), "m.lora_B.weight": torch.randn(8, 2)}
    half = Stated(peft_type="LORA", lora_alpha=1, r=2)
    exact = merged(base, factors, half)
    assert exact["m.weight"].dtype == torch.float32
    narrow = merged(base, factors, half, torch.bfloat16)
    assert torch.equal(narrow["m.weight"], exact["m.weight"].bfloat16())
    assert narrow["other.weight"] is base["other.weight"]
    base["m.weight"] = base["m.weight"].bfloat16()
    wide = merged(base, factors, half, torch.float32)["m.weight"]
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.equal(merged(base, factors, half)["m.weight"], wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_layer_that_was_saved_too_has_to_be_the_bases(dtype):
    """The layer's dtype does not matter: SGLang reads no such layer."""
    a, b, own = torch.randn(2, 8), torch.randn(8, 2), torch.randn(8, 8)
    factors = {"m.lora_A.weight": a, "m.lora_B.weight": b, "m.base_layer.weight": own.to(dtype)}
    twice = Stated(peft_type="LORA", lora_alpha=4, r=2)
    result = merged({"m.weight": own}, factors, twice)
    assert_differ_by_rounding(result["m.weight"], own + 2 * b @ a, terms=3)
    with pytest.raises(ConfigError, match=r"its m.weight is not the base's.* merge it with peft"):
        merged({"m.weight": own + 1}, factors, twice)


def test_the_command_merges_or_says_why_not(plain, tmp_path):
    base, adapter = plain
    for weights, code in ((base, 0), (tmp_path, 1)):
        command = [sys.executable, "-m", "tools.merge", "--base", str(weights)]
        command += ["--adapter", str(adapter), "--out", str(tmp_path / "out")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == code
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert done.stdout.startswith(f"merge: {tmp_path} has neither model.safetensors")


def test_no_adapter_in_the_repository_lies_beside_whole_weights():
    """If peft is installed, transformers would apply the adapter to the whole weights."""
    adapters = list((ROOT / "examples").rglob("adapter_config.json"))
    assert adapters
    for file in adapters:
        assert not (file.parent / "config.json").exists()
        assert not (file.parent / "model.safetensors").exists()
