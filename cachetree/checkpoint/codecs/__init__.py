"""KV and E in fewer bytes: lossy codecs of fixed size, for the wire and for disk.

A codec works on vectors: one head of one token's K or V, or an equally long piece of one token's E.
Every vector takes the same number of bytes. So pages keep known sizes and may be cut anywhere
between two vectors:

    bytes [0, payload)            the values
    bytes [payload, payload + 2)  their scale, bfloat16, little-endian

    codec   payload of n values   values
    int8    n                     scale × -127 … 127
    int4    n / 2                 scale × -7 … 7, of the vector after a Hadamard rotation

The rotation spreads a large channel over all channels (QuaRot, NeurIPS '24; K has such channels).
So one scale fits the whole vector. The rotation is orthogonal, and undone after decoding.

Values have to be finite: a NaN or an infinity spoils only its own vector.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch
from torch import Tensor

from cachetree.checkpoint.family import SCALE_BYTES, Codec, vector_bytes

__all__ = ["DEVICE_BYTES", "decode", "encode", "prepare"]

DEVICE_BYTES: Final = {Codec.NONE: (0.0, 0.0), Codec.INT8: (12.0, 1.1), Codec.INT4: (12.0, 8.6)}
"""Largest number of bytes per value that `encode` and `decode` need on a device, besides their
input and result."""
BLOCK_VECTORS: Final = 512
_INT8_MAX: Final = 127.0
_INT4_MAX: Final = 7.0


def prepare(codec: Codec, length: int, device: torch.device) -> None:
    """Make the tensors that coding of vectors of this length needs. Otherwise the first `encode` or
    `decode` makes them, and the host waits."""
    if codec is Codec.INT4:
        _hadamard(length, device)


def encode(codec: Codec, vectors: Tensor) -> Tensor:
    """Encode `[vectors, length]` of a floating type as `[vectors, vector_bytes]` uint8."""
    length = vectors.shape[1]
    if codec is Codec.NONE:
        return vectors.contiguous().view(torch.uint8)
    size = vector_bytes(codec, length, vectors.dtype.itemsize)
    encoded = torch.empty((vectors.shape[0], size), dtype=torch.uint8, device=vectors.device)
    for part, into in zip(_blocks(vectors), _blocks(encoded), strict=True):
        _encode(codec, part, into)
    return encoded


def decode(codec: Codec, encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode `[vectors, vector_bytes]` uint8 to `[vectors, length]`: the reverse of `encode`."""
    if codec is Codec.NONE:
        return encoded.view(dtype)
    payload = encoded.shape[1] - SCALE_BYTES
    length = 2 * payload if codec is Codec.INT4 else payload
    decoded = torch.empty((encoded.shape[0], length), dtype=dtype, device=encoded.device)
    for part, into in zip(_blocks(encoded), _blocks(decoded), strict=True):
        _decode(codec, part, into)
    return decoded


def _blocks(vectors: Tensor) -> list[Tensor]:
    """Split vectors into blocks, so that the results of one block stay in a core's cache."""
    num = BLOCK_VECTORS if vectors.device.type == "cpu" else max(1, len(vectors))
    return [vectors[first : first + num] for first in range(0, len(vectors), num)]


def _encode(codec: Codec, vectors: Tensor, into: Tensor) -> None:
    values = vectors.float()
    if codec is Codec.INT4:
        values = values @ _hadamard(values.shape[1], values.device)
    scale = _scale(values, codec)
    into[:, -SCALE_BYTES:] = scale.view(torch.uint8)
    values = values * torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    payload = into[:, :-SCALE_BYTES]
    if codec is Codec.INT8:
        payload.view(torch.int8).copy_(values.round_().clamp_(-_INT8_MAX, _INT8_MAX))
    else:
        whole = values.round_().clamp_(-_INT4_MAX, _INT4_MAX).add_(8).to(torch.uint8)
        half = whole.shape[1] // 2
        torch.bitwise_or(whole[:, :half], whole[:, half:] << 4, out=payload)


def _decode(codec: Codec, encoded: Tensor, into: Tensor) -> None:
    scale = encoded[:, -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()
    payload = encoded[:, :-SCALE_BYTES]
    if codec is Codec.INT8:
        torch.mul(payload.view(torch.int8), scale, out=into)
    else:
        values = torch.cat([payload & 15, payload >> 4], 1).float().sub_(8).mul_(scale)
        into.copy_(values @ _hadamard(values.shape[1], values.device))


def _scale(values: Tensor, codec: Codec) -> Tensor:
    """Return the scales, bfloat16 `[vectors, 1]`: each vector's largest absolute value, divided by
    the largest code."""
    largest = values.abs().amax(1, keepdim=True)
    steps = _INT8_MAX if codec is Codec.INT8 else _INT4_MAX
    return (largest / steps).to(torch.bfloat16)


@cache
def _hadamard(length: int, device: torch.device) -> Tensor:
    """Return a Hadamard matrix, scaled so that it is its own inverse (Sylvester's construction).

    It is made on the host; the copy to the device is finished on return. So any stream may read it.
    """
    matrix = torch.ones(1, 1, device="cpu")
    while matrix.shape[0] < length:
        top = torch.cat([matrix, matrix], 1)
        matrix = torch.cat([top, torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(length)).to(device)
