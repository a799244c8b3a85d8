"""Quantised checkpoints are profiled with their dequantised matrices, and have identities of their
own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_parts import FORMATS, full_of, write_quantised
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig

from cachetree.checkpoint import first_difference, read_model_identity
from cachetree.errors import ConfigError
from profiles.compute.models import ModelSource, load_model, load_pair
from profiles.compute.quantised import matrices
from profiles.random_models import shape, write_models

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = shape("llama", layers=NUM_LAYERS, hidden=64, heads=4, kv_heads=2)
    (path,) = write_models(tmp_path_factory.mktemp("quantised"), config, ["base"], std=0.2)
    return path


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_has_the_matrices_that_were_stored(base, tmp_path, name):
    quantised = write_quantised(base, tmp_path / name, name)
    loaded = load_model(ModelSource(path=quantised)).state_dict()
    full = load_file(full_of(quantised))
    plain = load_file(base / "model.safetensors")
    assert loaded.keys() == full.keys() == plain.keys()
    for key, weight in loaded.items():
        torch.testing.assert_close(weight, full[key], rtol=0, atol=1e-6)
        assert ("_proj" in key) != torch.equal(weight, plain[key])


def test_gptq_without_an_order_of_its_groups_has_them_in_turn():
    weights = {
        "l.qweight": torch.randint(0, 2**31, (8, 16), dtype=torch.int32),
        "l.qzeros": torch.randint(0, 2**31, (4, 2), dtype=torch.int32),
        "l.scales": torch.rand(4, 16),
    }
    config = {"quant_method": "gptq", "bits": 4}
    stated = {**weights, "l.g_idx": torch.arange(64, dtype=torch.int32) // 16}
    plain, expected = (matrices(it, config, torch.float32) for it in (weights, stated))
    assert torch.equal(plain["l.weight"], expected["l.weight"])


def test_gptq_is_what_servers_join_and_compute_in_bfloat16(base, tmp_path):
    """SGLang keeps one `g_idx` for matrices that multiply the same values. For other types of
    weights, its kernel takes only float16."""
    quantised = write_quantised(base, tmp_path / "gptq", "gptq")
    stated = json.loads((quantised / "config.json").read_text())["quantization_config"]
    assert (stated["bits"], stated["sym"]) in GPTQMarlinConfig.TYPE_MAP
    weights = load_file(quantised / "model.safetensors")
    for joined in ("[qkv]", "(gate|up)"):
        name = re.compile(rf".*layers\.0\..*\.{joined}_proj\.g_idx")
        first, *others = (it for key, it in weights.items() if name.fullmatch(key))
        assert others and all(torch.equal(first, it) for it in others)
    zeros = {int(it) for key, each in weights.items() if "qzeros" in key for it in each.unique()}
    assert zeros == {0x77777777}


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_known_by_its_tensors_and_by_its_config(base, tmp_path, name):
    quantised = write_quantised(base, tmp_path / name, name)
    identity = read_model_identity(quantised)
    assert identity != read_model_identity(base)
    weights = load_file(quantised / "model.safetensors")
    last = max(key for key in weights if f"layers.{NUM_LAYERS - 1}.self_attn.k_proj" in key)
    changed = {key: it.clone() for key, it in weights.items()}
    changed[last].flatten()[-1:] = 0
    save_file(changed, quantised / "model.safetensors")
    other = read_model_identity(quantised)
    assert other.weights != identity.weights
    edit(quantised, modules_to_not_convert=["lm_head"])
    assert read_model_identity(quantised).weights not in (identity.weights, other.weights)


def test_a_pair_differs_from_the_first_layer_whose_stored_tensors_do(base, tmp_path):
    sender, receiver = (write_quantised(base, tmp_path / it, "gptq") for it in ("one", "two"))
    weights = load_file(receiver / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.scales"] *= 2
    save_file(weights, receiver / "model.safetensors")
    assert first_difference(sender, receiver) == 2
    pair = load_pair(ModelSource(path=sender), ModelSource(path=receiver))
    theirs, ours = (it.model.layers[2].mlp.up_proj.weight for it in (pair.sender, pair.receiver))
    torch.testing.assert_close(2 * theirs, ours)
    assert pair.sender_identity.model_id != pair.receiver_identity.model_id


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}},
        {"quant_method": "compressed-tensors"},
        {"quant_algo": "FP8"},
    ],
)
def test_unknown_quantisation_is_refused_before_weights_are_read(base, tmp_path, stated):
    quantised = write_quantised(base, tmp_path / "refused", "fp8")
    config = json.loads((base / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(ConfigError, match=r"quantization_config = .*unquantised weights, and with"):
        load_model(ModelSource(path=quantised))
