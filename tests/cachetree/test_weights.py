"""Tensors that an update replaces. After the update, the model is the checkpoint with the same
tensors."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_parts import CONFIG, weights, write

from cachetree.checkpoint.digests import bytes_digest
from cachetree.checkpoint.identity import read_model_identity, read_weights
from cachetree.checkpoint.weights import Weights
from cachetree.errors import ConfigError

Q, HEAD, EMBED = (
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
    "model.embed_tokens.weight",
)


def digests(tensors: dict[str, np.ndarray]) -> dict[str, str]:
    return {
        name: bytes_digest("F32", it.shape, memoryview(it).cast("B"))
        for name, it in tensors.items()
    }


def test_replaced_tensors_make_the_checkpoint_that_has_them(tmp_path):
    old, new = weights(0), weights(1)
    served = read_weights(write(tmp_path / "old", old))
    assert served.identity == read_model_identity(tmp_path / "old")
    mixed = old | {Q: new[Q]}
    partial = served.after(digests({Q: new[Q]}))
    assert partial.identity == read_model_identity(write(tmp_path / "mixed", mixed))
    assert partial.after(digests(new)).identity == read_model_identity(write(tmp_path / "n", new))
    assert partial.after(digests(old)).identity == served.identity


def test_a_folder_replaces_what_it_has(tmp_path):
    old, new = weights(0), weights(1)
    served = read_weights(write(tmp_path / "old", old))
    whole = write(tmp_path / "new", new)
    assert served.after_folder(whole).identity == read_model_identity(whole)
    half = write(tmp_path / "half", {Q: new[Q]})
    assert served.after_folder(half).identity == served.after(digests({Q: new[Q]})).identity
    assert served.unknown().after_folder(half).identity is None
    assert served.unknown().after_folder(whole).identity == read_model_identity(whole)


def test_config_and_tokenizer_stay_those_of_the_start(tmp_path):
    served = read_weights(write(tmp_path / "old"))
    config = {**CONFIG, "rope_theta": 1.0}
    assert served.after_folder(write(tmp_path / "new", weights(1), config)).identity == (
        read_model_identity(write(tmp_path / "as_served", weights(1)))
    )


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", ("F32", (64, 128)), "has no such tensor"),
        (Q, ("BF16", (64, 128)), "BF16 of shape"),
        (Q, ("F32", (128, 64)), r"has F32 of shape \[64, 128\]"),
    ],
)
def test_another_layout_is_not_the_checkpoints(tmp_path, name, layout, why):
    served = read_weights(write(tmp_path / "m"))
    assert served.takes(Q, ("F32", (64, 128)))
    with pytest.raises(ConfigError, match=why):
        served.takes(name, layout)


def test_packed_weights_have_no_names(tmp_path):
    config = {**CONFIG, "quantization_config": {"quant_method": "awq"}}
    served = read_weights(write(tmp_path / "m", config=config))
    with pytest.raises(ConfigError, match="quantised"):
        served.takes(Q, ("F32", (64, 128)))


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tied_head_does_not_count(tmp_path, is_stored):
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = weights(0)
    del tensors[HEAD]
    head = {HEAD: tensors[EMBED]} if is_stored else {}
    served: Weights = read_weights(write(tmp_path / "m", tensors | head, config))
    assert not served.takes(HEAD, ("F32", (200, 32)))
    new = {EMBED: weights(1)[EMBED]}
    written = write(tmp_path / "new", tensors | new, config)
    assert served.after(digests(new)).identity == read_model_identity(written)


def test_tables_of_rotations_do_not_count(tmp_path):
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    served = read_weights(write(tmp_path / "m", weights() | table))
    assert served.identity == read_model_identity(write(tmp_path / "without"))
    assert not served.takes(*table, ("F32", (4,)))
