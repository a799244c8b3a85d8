"""Identity by content, on tiny checkpoints that these tests write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_parts import CONFIG, NUM_LAYERS, weights, write
from safetensors.numpy import save_file

from cachetree.checkpoint.family import Family
from cachetree.checkpoint.identity import first_difference, read_model_identity, read_shape
from cachetree.checkpoint.rope import canonical_rope, varying_rope
from cachetree.checkpoint.safetensors_files import weight_files
from cachetree.errors import ConfigError


def test_identity_of_a_checkpoint_has_all_its_fields(tmp_path):
    identity = read_model_identity(write(tmp_path / "m"))
    assert identity.architecture == "LlamaForCausalLM"
    assert (identity.num_layers, identity.hidden_size) == (NUM_LAYERS, 32)
    assert (identity.num_attention_heads, identity.num_kv_heads, identity.head_dim) == (4, 2, 8)
    Family(**identity.shape, model_dtype="float32", kv_dtype="float32", page_size=16)


def test_a_shape_is_read_without_weights(tmp_path):
    model = write(tmp_path / "m")
    identity = read_model_identity(model)
    (model / "model.safetensors").unlink()
    assert read_shape(model) == identity.shape
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_shape(tmp_path / "nowhere")


def test_head_sizes_have_defaults_and_may_be_nested(tmp_path):
    config = {**CONFIG, "head_dim": 16}
    del config["num_key_value_heads"]
    identity = read_model_identity(write(tmp_path / "m", config=config))
    assert (identity.num_kv_heads, identity.head_dim) == (4, 16)
    architectures = {"architectures": ["VisionModel"]}
    nested = {**architectures, "text_config": {**config, "architectures": None}}
    inner = read_model_identity(write(tmp_path / "n", config=nested))
    assert (inner.architecture, inner.head_dim) == ("VisionModel", 16)


def test_names_and_the_way_it_is_saved_do_not_matter(tmp_path):
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


@pytest.mark.parametrize("where", [0, -1, 1500, 64 * 128 // 2])
def test_a_changed_weight_is_another_model_of_the_same_family(tmp_path, where):
    before = read_model_identity(write(tmp_path / "a"))
    tensors = weights()
    tensors["model.layers.1.self_attn.k_proj.weight"].reshape(-1)[where] += 1
    after = read_model_identity(write(tmp_path / "b", tensors))
    assert after.weights != before.weights
    assert after.model_id != before.model_id
    assert after.tokenizer == before.tokenizer and after.rope == before.rope


def test_a_tied_head_that_is_stored_again_is_the_same_model(tmp_path):
    tied, tensors = {**CONFIG, "tie_word_embeddings": True}, weights()
    del tensors["lm_head.weight"]
    plain = write(tmp_path / "a", tensors, tied)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    again = write(tmp_path / "b", tensors | head, tied)
    assert read_model_identity(again) == read_model_identity(plain)
    assert first_difference(plain, again) == NUM_LAYERS
    head["lm_head.weight"][7] += 1
    other = write(tmp_path / "c", tensors | head, tied)
    assert read_model_identity(other) != read_model_identity(plain)
    assert first_difference(plain, other) == 0


def test_tables_of_rotations_that_a_server_skips_do_not_count(tmp_path):
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    plain, old = write(tmp_path / "a"), write(tmp_path / "b", weights() | table)
    assert read_model_identity(old) == read_model_identity(plain)
    assert first_difference(old, plain) == NUM_LAYERS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-6),
        ("hidden_act", "gelu"),
        ("sliding_window", 64),
        ("scale_emb", 2.0),  # Of a Qwen2, and
        ("rope_is_neox_style", False),  # of a Llama, in SGLang alone.
    ],
)
def test_a_changed_computation_is_another_model(tmp_path, key, value):
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
    [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}],
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
    [{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}],
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
    [{"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256}],
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
            }
        },
    ],
    [
        {
            "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [3, 4]},
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
        }
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


def test_one_rotation_is_one_string_and_two_are_two():
    base = {"max_position_embeddings": 128}
    strings = [{canonical_rope(base | config) for config in same} for same in ROPES]
    assert [len(same) for same in strings] == [1] * len(ROPES)
    assert len(set.union(*strings)) == len(ROPES)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "varies"),
    [
        ({}, ""),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ""),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, "longrope"),
        ({"rope_parameters": LONG}, ""),
        ({"rope_parameters": LONG, "max_position_embeddings": 129}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
    ],
)
def test_rotations_by_more_than_the_position_are_told(config, varies):
    assert varying_rope(canonical_rope({"max_position_embeddings": 128} | config)) == varies


def test_other_tokenizer_files_are_read_where_there_is_no_tokenizer_json(tmp_path):
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


def write_index(folder: Path, *shards: str) -> None:
    index = {"weight_map": {str(it): name for it, name in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_two_sets_of_weights_are_refused(tmp_path):
    """SGLang loads an index rather than a single file. Without an index, it loads all files in the
    folder."""
    model = write(tmp_path / "m")
    identity = read_model_identity(model)
    one = model / "model.safetensors"
    shutil.copy(one, model / "consolidated.safetensors")
    assert read_model_identity(model) == identity, "SGLang ignores it"
    other = model / "model_old.safetensors"
    shutil.copy(one, other)
    for read in (read_model_identity, weight_files):
        with pytest.raises(ConfigError, match=rf"{other} is beside .* remove"):
            read(model)
    write_index(model, one.name)
    assert read_model_identity(model) == identity, "only what the index names"
    write_index(model, other.name)
    with pytest.raises(ConfigError, match=rf"{one} is beside .* remove"):
        read_model_identity(model)
    one.unlink()
    assert read_model_identity(model) == identity


def write_adapter(folder: Path, alpha: int = 16, first: float = 0.0) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q", "k"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensor = np.zeros((2, 8), dtype=np.float32)
    tensor[0, 0] = first
    save_file({"layers.0.q.lora_A.weight": tensor}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_makes_another_model(tmp_path):
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
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    for name in ("b.safetensors", "consolidated.safetensors"):  # SGLang loads it all.
        other = shutil.copy(tmp_path / "b" / "adapter_model.safetensors", tmp_path / "d" / name)
        with pytest.raises(ConfigError, match=rf"{other} is beside"):
            read_model_identity(model, adapter=tmp_path / "d")
        Path(other).unlink()
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        read_model_identity(model, adapter=tmp_path / "a")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, file):
    model = write(tmp_path / "m")
    (model / file).unlink()
    with pytest.raises(ConfigError, match=file.replace(".", r"\.")):
        read_model_identity(model)


def test_broken_files_are_named(tmp_path):
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
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"no model\.safetensors\.index\.json, which names the"):
        read_model_identity(model)
    write_index(model, "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"names model-1\.safetensors"):
        read_model_identity(model)
    with pytest.raises(ConfigError, match="hidden_size = None"):
        read_model_identity(write(tmp_path / "n", config={**CONFIG, "hidden_size": None}))
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_model_identity(model)
