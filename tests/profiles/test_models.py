"""Models for the profiler: loaded correctly, or refused in one line before anything is read."""

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from cachetree.checkpoint.identity import read_model_identity
from cachetree.errors import ConfigError
from profiles.adapters import read_config
from profiles.compute.models import (
    ARCHITECTURES,
    ModelSource,
    load_model,
    load_pair,
    load_tokenizer,
)
from profiles.random_models import shape, write_models
from tools.merge import merge_folder

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "pairs" / "weights"
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral"]
FAMILIES += ["arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"]
NUM_LAYERS = 3
IDS = torch.arange(3, 40)[None]


def write_base(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    config = shape(family, layers=NUM_LAYERS, hidden=64, heads=4, kv_heads=2)
    for key, value in {"sliding_window": None, "intermediate_size": 96, **changes}.items():
        setattr(config, key, value)
    (path,) = write_models(folder.parent, config, [folder.name], std=0.2, seed=seed)
    return path


def write_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    config = LoraConfig(**{"target_modules": "all-linear", "init_lora_weights": False} | settings)
    torch.manual_seed(3)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Write two models of one family, and an adapter on the first that begins at layer 1."""
    folder = tmp_path_factory.mktemp("models")
    base = write_base(folder / "base")
    upper = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 2]}
    adapter = write_adapter(base, folder / "adapter", **upper)
    return base, write_base(folder / "other", seed=1), adapter


@pytest.fixture
def base(models, tmp_path: Path) -> Path:
    """Return a copy of the base that a test may break."""
    return Path(shutil.copytree(models[0], tmp_path / "broken"))


def load(path: Path, adapter: Path | None = None, dtype=torch.float32) -> PreTrainedModel:
    return load_model(ModelSource(path=path, adapter=adapter), dtype=dtype)


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_is_what_transformers_loads(family, dtype, tmp_path):
    base = write_base(tmp_path / "base", family)
    model, expected = (
        load(base, dtype=dtype),
        AutoModelForCausalLM.from_pretrained(base, dtype=dtype),
    )
    assert_equal(model, expected)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert type(model) is type(expected) and not model.training
    assert model.dtype == dtype
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.eos_token_id == expected.generation_config.eos_token_id


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_an_adapter_is_applied_as_peft_does(family, tmp_path):
    base = write_base(tmp_path / "base", family)
    adapter = write_adapter(base, tmp_path / "adapter", lora_alpha=24)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = plain(IDS).logits
    expected = PeftModel.from_pretrained(plain, adapter)(IDS).logits
    assert torch.allclose(load(base, adapter)(IDS).logits, expected, atol=1e-3)
    assert not torch.allclose(before, expected, atol=1e-1)


def test_an_adapter_is_merged_and_then_cast(models):
    base, _, adapter = models
    wide, narrow = load(base, adapter), load(base, adapter, torch.bfloat16)
    for ours, exact in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours, exact.bfloat16())


def test_a_merged_folder_is_the_model_that_was_merged_in_memory(tmp_path):
    base, adapter = SHIPPED / "foundation", SHIPPED / "receiver_lora"
    merge_folder(base, adapter, tmp_path / "merged")
    assert_equal(
        load(base, adapter, torch.bfloat16), load(tmp_path / "merged", None, torch.bfloat16)
    )


def test_a_full_disk_leaves_no_weights_that_look_whole(tmp_path, monkeypatch):
    def save_file(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("tools.merge.save_file", save_file)
    with pytest.raises(OSError, match="no space left"):
        merge_folder(SHIPPED / "foundation", SHIPPED / "receiver_lora", tmp_path)
    assert (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_pair_says_who_it_is_of():
    paths = [SHIPPED / name for name in ("sender", "receiver")]
    pair = load_pair(*(ModelSource(path=path) for path in paths))
    assert pair.num_layers == 12
    assert [pair.sender_identity, pair.receiver_identity] == [read_model_identity(p) for p in paths]
    for model, path in zip((pair.sender, pair.receiver), paths, strict=True):
        assert_equal(model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    assert (
        pair.tokenizer("<bos> question").input_ids
        == load_tokenizer(ModelSource(path=paths[1]))("<bos> question").input_ids
    )


def test_adapters_on_one_base_share_what_they_do_not_touch(models):
    base, _, adapter = models
    pair = load_pair(ModelSource(path=base), ModelSource(path=base, adapter=adapter))
    assert_equal(pair.sender, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert_equal(pair.receiver, load(base, adapter))
    sender, receiver = (dict(m.named_parameters()) for m in (pair.sender, pair.receiver))
    shared = {name for name in sender if sender[name].data_ptr() == receiver[name].data_ptr()}
    assert "model.embed_tokens.weight" in shared
    assert "model.layers.0.self_attn.q_proj.weight" in shared
    assert "model.layers.1.self_attn.q_proj.weight" not in shared
    assert pair.first_difference == 1
    assert pair.receiver_identity == read_model_identity(base, adapter=adapter)
    assert pair.sender_identity.model_id != pair.receiver_identity.model_id


def test_the_sender_may_have_a_device_of_its_own(models):
    base, other, _ = models
    elsewhere = {"sender_device": torch.device("meta")}
    pair = load_pair(ModelSource(path=base), ModelSource(path=other), **elsewhere)
    assert (pair.sender.device.type, pair.receiver.device.type) == ("meta", "cpu")


def test_bases_of_their_own_are_each_read(models):
    base, other, adapter = models
    pair = load_pair(ModelSource(path=base, adapter=adapter), ModelSource(path=other))
    assert_equal(pair.sender, load(base, adapter))
    assert_equal(pair.receiver, load(other))
    assert pair.first_difference == 0


def refused(path: Path, match: str, adapter: Path | None = None) -> None:
    source = ModelSource(path=path, adapter=adapter)
    with pytest.raises(ConfigError, match=match):
        load_model(source)
    with pytest.raises(ConfigError, match=match) as caught:
        load_pair(source, source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32 and 64"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 4 and 2"),
        ({"head_dim": 32}, "head_dim is 32 and 16"),
        ({"num_hidden_layers": 2}, "num_layers is 2 and 3"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope is .*500000.*10000.*",
        ),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else None,
)
def test_another_family_is_refused_by_field(models, tmp_path, changes, message):
    other = write_base(tmp_path / "other", **changes)
    sources = ModelSource(path=other), ModelSource(path=models[0])
    with pytest.raises(
        ConfigError, match=f"{other} and receiver .* {message}; give two fine-tunes"
    ):
        load_pair(*sources)


def test_models_of_one_layer_are_refused(tmp_path):
    sources = [ModelSource(path=write_base(tmp_path / it, num_hidden_layers=1)) for it in "ab"]
    with pytest.raises(ConfigError, match="have one layer only"):
        load_pair(*sources)


def test_another_architecture_or_tokenizer_is_refused(models, base, tmp_path):
    qwen = write_base(tmp_path / "qwen", "qwen3")
    with pytest.raises(ConfigError, match="architecture is 'Qwen3ForCausalLM' and 'LlamaFor"):
        load_pair(ModelSource(path=qwen), ModelSource(path=base))
    text = (base / "tokenizer.json").read_text().replace('"w7"', '"other"')
    (base / "tokenizer.json").write_text(text)
    message = rf"token 7 is 'other' and 'w7'; .* copy {base}/tokenizer.json to {models[0]}"
    with pytest.raises(ConfigError, match=message):
        load_pair(ModelSource(path=base), ModelSource(path=models[0]))


def test_unsupported_architectures_are_refused(base):
    refused(
        edit_config(base, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel of .*supported are"
    )


def test_the_architectures_are_those_of_a_server():
    tree = ast.parse((ROOT / "sglang_droidspeak" / "start" / "refuse.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARCHITECTURES"
    )
    assert {it.value for it in ast.walk(value) if isinstance(it, ast.Constant)} == set(
        ARCHITECTURES
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window = 64"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window = 64",
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
    ],
)
def test_sliding_windows_are_refused(family, changes, message, tmp_path):
    base = write_base(tmp_path / "base", family)
    refused(edit_config(base, **changes), f"{base}/config.json has .*{message}")


def test_a_window_that_mistral_has_unless_it_is_stated_is_refused(tmp_path):
    base = write_base(tmp_path / "base", "mistral")
    config = json.loads((base / "config.json").read_text())
    assert config.pop("sliding_window") is None
    (base / "config.json").write_text(json.dumps(config))
    refused(base, "sliding_window = 4096.* state sliding_window as null")


def test_rotations_by_more_than_the_position_are_refused(base):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    refused(edit_config(base, rope_parameters=rope), f"{base}/config.json has rope_type dynamic")


def test_an_adapter_in_the_wrong_place_is_refused(models, base):
    _, _, adapter = models
    refused(adapter, "holds an adapter and no model; give its base")
    shutil.copy(adapter / "adapter_config.json", base)
    refused(base, "also holds adapter_config.json; move the adapter")


def test_an_adapter_that_does_not_fit_is_refused(models, tmp_path):
    base, _, adapter = models
    refused(base, "adapter folder .* does not exist", tmp_path / "nowhere")
    refused(base, r"adapter_model\.safetensors are missing", tmp_path)
    larger = write_base(tmp_path / "larger", intermediate_size=128)
    refused(larger, "adapter .* is of .* and the base's of .*; give the base", adapter)
    dora = write_adapter(base, tmp_path / "dora", use_dora=True, target_modules=["q_proj"])
    refused(base, "has use_dora = True", dora)


def test_an_adapter_is_scaled_as_sglang_scales_it(models, tmp_path):
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    written = write_adapter(models[0], tmp_path / "written", r=4, lora_alpha=9)
    for folder in (SHIPPED / "receiver_lora", SHIPPED / "tables_lora", written):
        config = LoRAConfig(path=str(folder))
        layers = SimpleNamespace(num_hidden_layers=NUM_LAYERS)
        scaling = LoRAAdapter("one", config, layers, None, None).scaling
        stated = read_config(folder)
        assert stated.lora_alpha / stated.r == scaling


def test_missing_and_wrong_tensors_are_refused(base):
    file = base / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks {name}; download"):
        load(base)
    save_file({**weights, name: whole[:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"do not fit its config\.json"):
        load(base)


def test_other_broken_folders_are_named(base, tmp_path):
    refused(tmp_path / "nowhere", "model folder .* does not exist")
    whole = (base / "tokenizer.json").read_text()
    for broken in ("{}", '{"added_tokens": [], "model": {"type": "BPE"}}'):
        (base / "tokenizer.json").write_text(broken)
        with pytest.raises(ConfigError, match=f"tokenizer of {base} cannot be loaded"):
            load_tokenizer(ModelSource(path=base))
        refused(base, "tokenizer.json cannot be read by tokenizers .* save it again")
    (base / "tokenizer.json").write_text(whole)
    refused(edit_config(base, hidden_act=3), "config.json cannot be used: .*'hidden_act'")
    (base / "model.safetensors").unlink()
    refused(base, r"has neither model\.safetensors")
    (base / "tokenizer.json").unlink()
    refused(base, r"has no tokenizer\.json")
