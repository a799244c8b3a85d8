"""Identity by content, on tiny checkpoints that these tests write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cachetree.adapters import read_adapter
from cachetree.errors import ConfigError
from cachetree.family import Family
from cachetree.identity import first_difference, read_model_identity
from cachetree.rope import canonical_rope

NUM_LAYERS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "transformers_version": "5.0",
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": some(200, 32), "model.norm.weight": some(32)}
    tensors |= {
        f"model.layers.{layer}.self_attn.{name}.weight": some(64, 128)
        for layer in range(NUM_LAYERS)
        for name in ("q_proj", "k_proj")
    }
    return tensors | {"lm_head.weight": some(200, 32)}


def write(
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    config: dict[str, Any] = CONFIG,
    tokenizer: dict[str, Any] = TOKENIZER,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def test_what_an_identity_says(tmp_path: Path) -> None:
    identity = read_model_identity(write(tmp_path / "m"))
    assert identity.architecture == "LlamaForCausalLM"
    assert (identity.num_layers, identity.hidden_size) == (NUM_LAYERS, 32)
    assert (identity.num_attention_heads, identity.num_kv_heads, identity.head_dim) == (4, 2, 8)
    Family.of(identity, kv_dtype="float32", page_size=16, tp_size=1, tp_rank=0)


def test_head_sizes_have_defaults_and_may_be_nested(tmp_path: Path) -> None:
    config = {**CONFIG, "head_dim": 16}
    del config["num_key_value_heads"]
    identity = read_model_identity(write(tmp_path / "m", config=config))
    assert (identity.num_kv_heads, identity.head_dim) == (4, 16)
    architectures = {"architectures": ["VisionModel"]}
    nested = {**architectures, "text_config": {**config, "architectures": None}}
    inner = read_model_identity(write(tmp_path / "n", config=nested))
    assert (inner.architecture, inner.head_dim) == ("VisionModel", 16)


def test_names_and_the_way_it_is_saved_do_not_matter(tmp_path: Path) -> None:
    one = write(tmp_path / "one")
    identity = read_model_identity(one)
    copy = Path(shutil.copytree(one, tmp_path / "another name"))
    (copy / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "6"}, indent=4))
    (copy / "model.safetensors").unlink()
    items = sorted(weights().items())
    shards = {"model-1.safetensors": dict(items[:4]), "model-2.safetensors": dict(items[4:])}
    for name, tensors in shards.items():
        save_file(tensors, copy / name, metadata={"format": "np"})
    index = {name: shard for shard, tensors in shards.items() for name in tensors}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_model_identity(copy) == identity


@pytest.mark.parametrize("where", [0, -1, 64 * 128 // 2])
def test_a_changed_weight_is_another_model_of_the_same_family(tmp_path: Path, where: int) -> None:
    before = read_model_identity(write(tmp_path / "a"))
    tensors = weights()
    tensors["model.layers.1.self_attn.k_proj.weight"].reshape(-1)[where] += 1
    after = read_model_identity(write(tmp_path / "b", tensors))
    assert after.weights != before.weights
    assert after.model_id != before.model_id
    assert after.tokenizer == before.tokenizer and after.rope == before.rope


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", 1e-6), ("hidden_act", "gelu"), ("sliding_window", 64)],
)
def test_a_changed_computation_is_another_model(tmp_path: Path, key: str, value: Any) -> None:
    before = read_model_identity(write(tmp_path / "a"))
    after = read_model_identity(write(tmp_path / "b", config={**CONFIG, key: value}))
    assert after.model_id != before.model_id


ROPES: list[list[dict[str, Any]]] = [
    [
        {},
        {"rope_theta": 10000},
        {"rope_theta": 10000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_theta": 10000.0},
    ],
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    ],
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
    ],
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000,
                "factor": 4,
                "original_max_position_embeddings": 128,
            }
        },
    ],
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
    ],
    [
        {
            "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [3, 4]},
            "original_max_position_embeddings": 64,
        },
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 2.0],
                "long_factor": [3.0, 4.0],
                "original_max_position_embeddings": 64,
            },
        },
    ],
    [
        {
            "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [3, 4]},
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
        },
    ],
    [
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        }
    ],
]


def test_one_rotation_is_one_string_and_two_are_two() -> None:
    base = {"max_position_embeddings": 128}
    strings = [{canonical_rope(base | config) for config in same} for same in ROPES]
    assert [len(same) for same in strings] == [1] * len(ROPES)
    assert len(set.union(*strings)) == len(ROPES)


def test_the_tokenizers_rules_count_and_its_decorations_do_not(tmp_path: Path) -> None:
    def digest(name: str, **changes: Any) -> str:
        tokenizer = {**TOKENIZER, **changes}
        return read_model_identity(write(tmp_path / name, tokenizer=tokenizer)).tokenizer

    same = digest("a")
    model = TOKENIZER["model"]
    assert digest("b", version="2.0", decoder={"type": "BPE"}, padding={"length": 3}) == same
    assert digest("c", model={**model, "merges": [["a", "b"]], "byte_fallback": False}) == same
    assert digest("d", model={**model, "vocab": {"a": 1, "b": 0, "ab": 2}}) != same
    assert digest("e", pre_tokenizer={"type": "Whitespace"}) != same
    assert digest("f", added_tokens=[{"id": 3, "content": "<x>"}]) != same


def test_other_tokenizer_files_are_read_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    def digest(model: bytes, settings: dict[str, Any]) -> str:
        folder = write(tmp_path / "m")
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(model)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return read_model_identity(folder).tokenizer

    same = digest(b"pieces", {"add_bos_token": True, "chat_template": "x"})
    assert digest(b"pieces", {"add_bos_token": True, "chat_template": "y"}) == same
    assert digest(b"pieces", {"add_bos_token": False}) != same
    assert digest(b"other pieces", {"add_bos_token": True}) != same


def write_adapter(folder: Path, alpha: int = 16, first: float = 0.0) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q", "k"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensor = np.zeros((2, 8), dtype=np.float32)
    tensor[0, 0] = first
    save_file({"layers.0.q.lora_A.weight": tensor}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_makes_another_model(tmp_path: Path) -> None:
    model = write(tmp_path / "m")
    plain = read_model_identity(model)
    adapters = [
        write_adapter(tmp_path / "a"),
        write_adapter(tmp_path / "b", alpha=32),
        write_adapter(tmp_path / "c", first=1.0),
    ]
    identities = [read_model_identity(model, adapter=adapter) for adapter in adapters]
    assert len({plain.model_id, *(it.model_id for it in identities)}) == 4
    assert {it.rope for it in identities} == {plain.rope}
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        read_model_identity(model, adapter=tmp_path / "a")


def test_the_cache_is_used_while_nothing_changed_and_survives_damage(tmp_path: Path) -> None:
    model, cache = write(tmp_path / "m"), tmp_path / "cache"
    identity = read_model_identity(model, cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"Llama", b"Other"))
    assert read_model_identity(model, cache).architecture == "OtherForCausalLM"
    for damage in (b"", b"{", b'{"architecture": 3}', b"\xff"):
        kept.write_bytes(damage)
        assert read_model_identity(model, cache) == identity
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert read_model_identity(model, cache) == identity
    assert len(list(cache.iterdir())) == 2
    write(model, weights(seed=1))
    assert read_model_identity(model, cache).weights != identity.weights


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = write(tmp_path / "m")
    assert read_model_identity(model, tmp_path / "file") == read_model_identity(model)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    model = write(tmp_path / "m")
    (model / file).unlink()
    with pytest.raises(ConfigError, match=file.replace(".", r"\.")):
        read_model_identity(model)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_model_identity(tmp_path / "nowhere")
    model = write(tmp_path / "m")
    with pytest.raises(ConfigError, match="adapter folder"):
        read_model_identity(model, adapter=tmp_path / "nowhere")
    whole = (model / "model.safetensors").read_bytes()
    for broken in (whole[:-1], whole[:20], b"", b"\xff" * 64, whole[:8] + b"!" + whole[9:]):
        (model / "model.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            read_model_identity(model)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"x": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names model-1\.safetensors"):
        read_model_identity(model)
    with pytest.raises(ConfigError, match="hidden_size = None"):
        read_model_identity(write(tmp_path / "n", config={**CONFIG, "hidden_size": None}))
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_model_identity(model)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.embed_tokens.weight", 0),
        ("model.layers.0.self_attn.q_proj.weight", 0),
        ("model.layers.2.self_attn.k_proj.weight", 2),
        ("model.norm.weight", NUM_LAYERS),
        ("lm_head.weight", NUM_LAYERS),
    ],
)
def test_the_first_difference_is_found_in_any_byte(tmp_path: Path, name: str, layer: int) -> None:
    a = write(tmp_path / "a")
    assert first_difference(a, a) == NUM_LAYERS
    tensors = weights()
    # A byte that no sample would see.
    flat = tensors[name].reshape(-1)
    flat[flat.size // 3] += 1
    assert first_difference(a, write(tmp_path / "b", tensors)) == layer
    del tensors[name]
    assert first_difference(a, write(tmp_path / "c", tensors)) == layer


def test_the_first_difference_also_minds_the_config(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    assert first_difference(a, write(tmp_path / "b", config={**CONFIG, "rope_theta": 5e5})) == 0
    assert first_difference(a, write(tmp_path / "c", config={**CONFIG, "rms_norm_eps": 1.0})) == 0
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        first_difference(a, write(tmp_path / "d", config={**CONFIG, "num_hidden_layers": 4}))


def write_lora(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """`tensors` under PEFT's names: `layers.1.mlp.up_proj.lora_A.weight`, `lm_head…`."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "rank_pattern": {}, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    inside = ("layers", "embed_tokens", "norm")
    named = {
        f"base_model.model.{'model.' if name.startswith(inside) else ''}{name}": tensor
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def factors(*modules: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"{module}.lora_{part}.weight": rng.standard_normal((2, 8), dtype=np.float32)
        for module in modules
        for part in "AB"
    }


Q0, K1, UP2 = "layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj", "layers.2.mlp.up_proj"


def two_adapters(
    folder: Path, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], **settings: Any
) -> int:
    """The first difference of two adapters on one base; `settings` are the second one's."""
    base = write(folder / "base")
    a = write_lora(folder / "a", ours, target_modules=["q_proj"], lora_dropout=0.1)
    b = write_lora(folder / "b", theirs, **settings)
    found = {first_difference(base, base, *pair) for pair in ((a, b), (b, a))}
    ours_read, theirs_read = (read_adapter(it, NUM_LAYERS) for it in (a, b))
    found |= {ours_read.first_difference(theirs_read), theirs_read.first_difference(ours_read)}
    assert len(found) == 1
    return found.pop()


def test_equal_adapters_differ_nowhere(tmp_path: Path) -> None:
    same = factors(Q0, K1, UP2)
    notes = {"target_modules": ["k_proj"], "inference_mode": True, "base_model_name_or_path": "x"}
    assert two_adapters(tmp_path, same, same, layers_to_transform=[0, 1], **notes) == NUM_LAYERS


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (Q0, 0),  # though K and V of layer 0 are the same: they are not what a block starts from
        (K1, 1),
        (UP2, 2),
        ("layers.1.input_layernorm", 1),
        ("layers.1.self_attn.q_norm", 1),
        ("embed_tokens", 0),
        ("something_else", 0),
        ("norm", NUM_LAYERS),
        ("lm_head", NUM_LAYERS),
    ],
)
def test_an_adapter_differs_from_its_base_where_it_has_tensors(
    tmp_path: Path, module: str, layer: int
) -> None:
    base = write(tmp_path / "m")
    names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight", f"{module}.weight"]
    for index, name in enumerate(names):
        zeros = {name: np.zeros((2, 8), dtype=np.float32)}
        adapter = write_lora(tmp_path / f"a{index}", zeros, layers_to_transform=[0])
        assert first_difference(base, base, adapter) == layer
        assert first_difference(base, base, None, adapter) == layer
        assert read_adapter(adapter, NUM_LAYERS).first_difference(None) == layer


def test_adapters_differ_at_the_first_unequal_tensor(tmp_path: Path) -> None:
    ours, theirs = factors(Q0, K1, UP2), factors(Q0, K1, UP2)
    theirs[f"{UP2}.lora_B.weight"][1, 3] += 1
    assert two_adapters(tmp_path, ours, theirs) == 2
    theirs = factors(Q0, K1, UP2)
    del theirs[f"{K1}.lora_A.weight"]
    assert two_adapters(tmp_path / "missing", ours, theirs) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 8},
        {"alpha_pattern": {"up_proj": 4}},
        {"rank_pattern": {"up_proj": 4}},
        {"use_rslora": True},
        {"use_dora": True},
        {"alora_invocation_tokens": [5]},
        {"a_setting_of_later": 1},
    ],
)
def test_adapters_that_are_applied_differently_differ_wherever_they_are(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert two_adapters(tmp_path, factors(K1, UP2), factors(K1, UP2), **settings) == 1


def test_settings_at_their_default_are_no_difference(tmp_path: Path) -> None:
    same, settings = factors(K1), {"use_rslora": False, "alpha_pattern": {}, "use_dora": None}
    assert two_adapters(tmp_path, same, same, **settings) == NUM_LAYERS


def test_bases_and_adapters_count_together(tmp_path: Path) -> None:
    a, tensors = write(tmp_path / "a"), weights()
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] += 1
    b = write(tmp_path / "b", tensors)
    low, high = write_lora(tmp_path / "low", factors(Q0)), write_lora(tmp_path / "up", factors(UP2))
    assert first_difference(a, b, high, high) == 1
    assert first_difference(a, b, high, None) == 1
    assert first_difference(a, b, low, high) == 0
    assert first_difference(Path(shutil.copytree(a, tmp_path / "copy")), a, high) == 2


def test_a_tied_head_is_the_embeddings(tmp_path: Path) -> None:
    tied, tensors = {**CONFIG, "tie_word_embeddings": True}, weights()
    adapter = write_lora(tmp_path / "a", factors("lm_head"))
    base = write(tmp_path / "stated", config=tied)
    assert first_difference(base, base, adapter) == 0
    del tensors["lm_head.weight"]
    base = write(tmp_path / "unstated", tensors)
    assert first_difference(base, base, adapter) == 0
    upper = write_lora(tmp_path / "b", factors(UP2))
    assert first_difference(base, base, upper) == 2


def test_an_adapter_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    base = write(tmp_path / "m")
    for index, (key, value) in enumerate(
        {"peft_type": "IA3", "layer_replication": [[0, 3]]}.items()
    ):
        adapter = write_lora(tmp_path / f"a{index}", factors(UP2), **{key: value})
        with pytest.raises(ConfigError, match=f"has {key} = "):
            first_difference(base, base, adapter, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors are missing"):
        first_difference(base, base, None, adapter)
