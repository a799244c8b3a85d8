"""The first layer at which two models differ, on tiny checkpoints that these tests write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_parts import CONFIG, NUM_LAYERS, weights, write
from safetensors.numpy import save_file

from cachetree.checkpoint.adapters import NO_ADAPTER, read_adapter
from cachetree.checkpoint.identity import first_difference
from cachetree.errors import ConfigError


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
def test_the_first_difference_is_found_in_any_byte(tmp_path, name, layer):
    a = write(tmp_path / "a")
    assert first_difference(a, a) == NUM_LAYERS
    tensors = weights()
    # A byte that no sample would see.
    flat = tensors[name].reshape(-1)
    flat[flat.size // 3] += 1
    assert first_difference(a, write(tmp_path / "b", tensors)) == layer
    del tensors[name]
    assert first_difference(a, write(tmp_path / "c", tensors)) == layer


def test_the_first_difference_also_minds_the_config(tmp_path):
    a = write(tmp_path / "a")
    assert first_difference(a, write(tmp_path / "b", config={**CONFIG, "rope_theta": 5e5})) == 0
    assert first_difference(a, write(tmp_path / "c", config={**CONFIG, "rms_norm_eps": 1.0})) == 0
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        first_difference(a, write(tmp_path / "d", config={**CONFIG, "num_hidden_layers": 4}))


def write_lora(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """Write a LoRA. `tensors` have PEFT's names: `layers.1.mlp.up_proj.lora_A.weight`,
    `lm_head…`."""
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


def two_adapters(folder, ours, theirs, **settings):
    """Return the first difference of two adapters on one base. `settings` are settings of the
    second adapter."""
    base = write(folder / "base")
    a = write_lora(folder / "a", ours, target_modules=["q_proj"], lora_dropout=0.1)
    b = write_lora(folder / "b", theirs, **settings)
    layers = {first_difference(base, base, *pair) for pair in ((a, b), (b, a))}
    ours_read, theirs_read = (read_adapter(it, NUM_LAYERS) for it in (a, b))
    layers |= {
        one.first_difference(other, NUM_LAYERS)
        for one, other in ((ours_read, theirs_read), (theirs_read, ours_read))
    }
    assert len(layers) == 1
    return layers.pop()


def test_equal_adapters_differ_nowhere(tmp_path):
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
def test_an_adapter_differs_from_its_base_where_it_has_tensors(tmp_path, module, layer):
    base = write(tmp_path / "m")
    names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight", f"{module}.weight"]
    for index, name in enumerate(names):
        zeros = {name: np.zeros((2, 8), dtype=np.float32)}
        adapter = write_lora(tmp_path / f"a{index}", zeros, layers_to_transform=[0])
        assert first_difference(base, base, adapter) == layer
        assert first_difference(base, base, None, adapter) == layer
        assert read_adapter(adapter, NUM_LAYERS).first_difference(NO_ADAPTER, NUM_LAYERS) == layer


def test_adapters_differ_at_the_first_unequal_tensor(tmp_path):
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
def test_adapters_that_are_applied_differently_differ_wherever_they_are(tmp_path, settings):
    assert two_adapters(tmp_path, factors(K1, UP2), factors(K1, UP2), **settings) == 1


def test_an_activated_adapter_of_the_head_is_refused(tmp_path):
    tensors = factors(K1) | factors("lm_head")
    assert read_adapter(write_lora(tmp_path / "plain", tensors), NUM_LAYERS).layers.keys() == {1}
    activated = write_lora(tmp_path / "activated", tensors, alora_invocation_tokens=[5])
    with pytest.raises(ConfigError, match="which SGLang applies to whole prompts"):
        read_adapter(activated, NUM_LAYERS)


def test_factors_of_embeddings_that_sglang_would_leave_out_are_refused(tmp_path):
    """SGLang leaves them out if target_modules does not name embeddings. Two adapters that differ
    only in them would get one model id."""
    tensors = factors(K1) | {"embed_tokens.lora_embedding_A": np.zeros((2, 200), np.float32)}
    for targets in (["k_proj", "model.embed_tokens"], "all-linear", None):
        folder = write_lora(tmp_path / f"{targets}", tensors, target_modules=targets)
        assert read_adapter(folder, NUM_LAYERS).layers.keys() == {0, 1}
    folder = write_lora(tmp_path / "left out", tensors, target_modules=["k_proj"])
    with pytest.raises(ConfigError, match="lora_embedding_A, which SGLang leaves out"):
        read_adapter(folder, NUM_LAYERS)


def test_settings_at_their_default_are_no_difference(tmp_path):
    same, settings = factors(K1), {"use_rslora": False, "alpha_pattern": {}, "use_dora": None}
    assert two_adapters(tmp_path, same, same, **settings) == NUM_LAYERS


def test_bases_and_adapters_count_together(tmp_path):
    a, tensors = write(tmp_path / "a"), weights()
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] += 1
    b = write(tmp_path / "b", tensors)
    low, high = write_lora(tmp_path / "low", factors(Q0)), write_lora(tmp_path / "up", factors(UP2))
    assert first_difference(a, b, high, high) == 1
    assert first_difference(a, b, high, None) == 1
    assert first_difference(a, b, low, high) == 0
    assert first_difference(Path(shutil.copytree(a, tmp_path / "copy")), a, high) == 2


def test_a_tied_head_is_the_embeddings(tmp_path):
    tied, tensors = {**CONFIG, "tie_word_embeddings": True}, weights()
    tensors["lm_head.weight"].reshape(-1)[0] += 1
    base = write(tmp_path / "base", config=tied)
    assert first_difference(base, write(tmp_path / "other", tensors, config=tied)) == 0


def test_an_adapter_of_a_tied_head_leaves_the_embeddings_alone(tmp_path):
    """SGLang gives the adapter a head of its own in `init_lora_modules`."""
    base = write(tmp_path / "base", config={**CONFIG, "tie_word_embeddings": True})
    for modules, layer in ((["lm_head"], NUM_LAYERS), (["lm_head", UP2], 2)):
        adapter = write_lora(tmp_path / f"{layer}", factors(*modules))
        assert first_difference(base, base, adapter) == layer


def test_an_adapter_that_cannot_be_compared_is_refused(tmp_path):
    base = write(tmp_path / "m")
    for index, (key, value) in enumerate(
        {"peft_type": "IA3", "layer_replication": [[0, 3]]}.items()
    ):
        adapter = write_lora(tmp_path / f"a{index}", factors(UP2), **{key: value})
        with pytest.raises(ConfigError, match=f"has {key} = "):
            first_difference(base, base, adapter, adapter)
    adapter = write_lora(tmp_path / "untyped", factors(UP2), peft_type=None)
    with pytest.raises(ConfigError, match='has no peft_type; set it to "LORA"'):
        first_difference(base, base, adapter)
    adapter = write_lora(tmp_path / "empty", factors(UP2))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors are missing"):
        first_difference(base, base, None, adapter)
