"""Distances by sketches: close to the true distances for any change, and equal from a folder and
from memory."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_parts import NUM_LAYERS, weights, write

from cachetree.checkpoint.digests import bytes_digest
from cachetree.checkpoint.identity import read_weights
from cachetree.checkpoint.sketches import distances, folder_sketches, sketch_of
from cachetree.errors import ConfigError

EMBED, Q, HEAD = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
)
RNG = np.random.default_rng(3)
BIG = RNG.standard_normal((600, 1024), dtype=np.float32)
COLUMN = np.zeros_like(BIG)
COLUMN[:, 7] = 1.0


def content(tensor: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(tensor)).cast("B")


def length(tensor: np.ndarray) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))


@pytest.mark.parametrize("share", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        RNG.standard_normal(BIG.shape, dtype=np.float32),
        np.outer(RNG.standard_normal(600), RNG.standard_normal(1024)).astype(np.float32),
        COLUMN,
    ],
    ids=["noise", "of rank one", "one column"],
)
def test_the_distance_is_known_within_ten_percent(change, share):
    after = BIG + change * np.float32(share * length(BIG) / length(change))
    sketches = ({Q: sketch_of(Q, "F32", content(it))} for it in (BIG, after))
    measured = distances(*sketches, NUM_LAYERS)
    assert measured == pytest.approx((0.0, 0.0, length(after - BIG) / length(BIG), 0.0), rel=0.1)


def test_a_half_precision_tensor_has_the_sketch_of_its_values():
    halves = (BIG.view(np.uint32) >> 16).astype(np.uint16)
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(
        sketch_of(Q, "BF16", content(halves)), sketch_of(Q, "F32", content(values))
    )
    with pytest.raises(ConfigError, match=f"{Q} is F8_E4M3"):
        sketch_of(Q, "F8_E4M3", content(halves))


def test_each_change_counts_at_its_place_and_a_head_at_none(tmp_path):
    before = weights(0)
    after = before | {EMBED: before[EMBED] * 1.5, Q: before[Q] * 1.25, HEAD: before[HEAD] * 2}
    start = write(tmp_path / "before", before)
    served = read_weights(start).sketched(start)
    other = served.after_folder(write(tmp_path / "after", after))
    measured = other.distances_from(served)
    assert measured is not None and len(measured) == 1 + NUM_LAYERS
    assert measured[0] == pytest.approx(0.5) and measured[1] == measured[3] == 0.0
    assert 0 < measured[2] < 0.25, "another matrix of the layer has not changed"


def test_a_change_that_is_no_number_is_infinite(tmp_path):
    before = weights(0)
    start = write(tmp_path / "before", before)
    served = read_weights(start).sketched(start)
    broken = write(tmp_path / "after", before | {Q: before[Q] * np.float32("nan")})
    assert served.after_folder(broken).distances_from(served) == (0.0, 0.0, np.inf, 0.0)


def test_tensors_from_memory_have_the_distance_of_a_folder(tmp_path):
    old, new = weights(0), weights(1)
    start = write(tmp_path / "old", old)
    served = read_weights(start).sketched(start)
    folder = write(tmp_path / "new", new)
    whole = served.after_folder(folder)

    def given(*names: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        digests = {it: bytes_digest("F32", new[it].shape, content(new[it])) for it in names}
        return digests, {it: sketch_of(it, "F32", content(new[it])) for it in names}

    half = served.after(*given(Q))
    assert half.distances_from(served)[2] > 0 and half.distances_from(served)[1] == 0.0  # type: ignore[index]
    assert half.after(*given(*new)).distances_from(served) == whole.distances_from(served)
    assert whole.distances_from(served.unknown()) is None
    assert whole.after(given(Q)[0]).distances_from(served) is None, "a tensor has no sketch"
    assert served.unknown().after(*given(Q)).distances_from(served) is None, "half is unknown"
    assert whole.distances_from(read_weights(start)) is None, "nothing asked for sketches"


def test_a_folder_that_ends_early_is_named(tmp_path):
    folder = write(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="download it again"):
        folder_sketches([file])
