"""Sizes and errors of codecs. No vector depends on another."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transport_parts import FAMILY

from cachetree.checkpoint.codecs import decode, encode
from cachetree.checkpoint.family import Codec, vector_bytes
from cachetree.errors import ConfigError

LOSSY = (Codec.INT8, Codec.INT4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def vectors(num: int = 256, length: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, length, generator=torch.Generator().manual_seed(seed))


def relative_error(codec: Codec, values: torch.Tensor) -> float:
    got = decode(codec, encode(codec, values), torch.float32)
    return float((got - values).norm() / values.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", Codec)
def test_every_vector_takes_the_stated_bytes(codec, dtype):
    for length in (32, 64, 128):
        encoded = encode(codec, vectors(5, length).to(dtype))
        assert encoded.dtype is torch.uint8
        assert encoded.shape == (5, vector_bytes(codec, length, dtype.itemsize))
        decoded = decode(codec, encoded, dtype)
        assert decoded.shape == (5, length) and decoded.dtype is dtype


def test_ratios_of_bfloat16():
    sizes = [vector_bytes(codec, 128, 2) for codec in Codec]
    assert sizes == [256, 130, 66]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_codec_nothing_changes(dtype):
    values = vectors().to(dtype)
    assert torch.equal(decode(Codec.NONE, encode(Codec.NONE, values), dtype), values)


def test_no_value_is_further_off_than_a_step():
    values = vectors()
    off = (decode(Codec.INT8, encode(Codec.INT8, values), torch.float32) - values).abs()
    largest = values.abs().amax(1, keepdim=True)
    # Half a step, and the rounding of the scale.
    assert bool((off <= largest / 127 * 0.55 + largest * 2**-8).all())


def test_errors_are_those_of_the_literature():
    """The error for normally distributed values is about 1 % with 8 bits and about 10 % with 4
    bits."""
    values = vectors(2000)
    assert relative_error(Codec.INT8, values) < 0.01
    assert 0.05 < relative_error(Codec.INT4, values) < 0.16


def test_a_large_channel_does_not_swallow_the_others():
    """The rotation spreads the large channel. Without it, 4 bits leave nothing of the small
    channels."""
    values = vectors(2000, 128)
    values[:, 7] *= 30
    got = decode(Codec.INT4, encode(Codec.INT4, values), torch.float32)
    small = [channel for channel in range(128) if channel != 7]
    error = (got - values)[:, small].norm() / values[:, small].norm()
    step = values.abs().amax(1, keepdim=True) / 7
    plain = (values / step).round() * step
    plain_error = (plain - values)[:, small].norm() / values[:, small].norm()
    assert error < 0.6 * plain_error


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_vectors_do_not_depend_on_their_neighbours(codec):
    values = vectors()
    together = encode(codec, values)
    for part in (slice(0, 1), slice(17, 90)):
        assert torch.equal(encode(codec, values[part]), together[part])
        alone = decode(codec, together[part], torch.float32)
        assert torch.equal(alone, decode(codec, together, torch.float32)[part])
    broken = values.clone()
    broken[3, 5], broken[9, 1] = float("nan"), float("inf")
    rest = [row for row in range(len(values)) if row not in (3, 9)]
    assert torch.equal(encode(codec, broken)[rest], together[rest])


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_zeros_stay_zeros_and_extremes_stay_finite(codec):
    values = torch.zeros(4, 64)
    values[1] = 1e-30
    values[2] = 3e38 / 64
    values[3, 0] = 1e4
    got = decode(codec, encode(codec, values), torch.float32)
    assert torch.equal(got[0], values[0])
    assert bool(got.isfinite().all())
    assert got[3, 0] == pytest.approx(1e4, rel=0.2)


def test_a_length_that_cannot_be_rotated_is_named():
    with pytest.raises(ConfigError, match=r"power of two, and this model's have 96; use int8"):
        vector_bytes(Codec.INT4, 96, 2)
    assert vector_bytes(Codec.INT8, 96, 2) == 98


@pytest.mark.parametrize("codec", Codec)
def test_a_familys_pages_have_the_size_of_their_vectors(codec):
    family = msgspec.structs.replace(FAMILY, codec=codec)
    num_vectors = family.page_size * 2 * family.num_kv_heads
    values = torch.zeros(num_vectors, family.head_dim, dtype=torch.float16)
    assert encode(codec, values).nbytes == family.kv_page_bytes
    values = torch.zeros(family.page_size, family.hidden_size, dtype=torch.float16)
    assert encode(codec, values.view(-1, family.head_dim)).nbytes == family.e_page_bytes


def test_e_that_cannot_be_cut_into_vectors_is_refused():
    family = msgspec.structs.replace(FAMILY, codec=Codec.INT8, hidden_size=80)
    with pytest.raises(ConfigError, match="head_dim 32, which does not divide hidden_size 80"):
        _ = family.e_page_bytes
    assert msgspec.structs.replace(family, codec=Codec.NONE).e_page_bytes == 16 * 80 * 2
