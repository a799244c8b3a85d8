"""Initial weights with attention heads that look at a fixed distance.

A head that reads the previous token is the first half of an induction head, and from random
weights it takes longer to appear than everything after it. Setting it at the start removes that
plateau: copying appears after a few hundred steps.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tools.pairs.model import Layer, TinyLlama, rope_frequencies

WIRED_LAYERS: Final[tuple[tuple[int, ...], ...]] = ((1, 2, 3, 1), (1, 2))
"""Per layer from the first: the distance each head looks back; later heads stay unwired."""

_SHARPNESS = 6.0
_SHARED_PART = 0.3  # length of the direction that all embeddings get in common
_NUM_FREQUENCIES = 5  # the fastest rotations, which tell close distances apart
_REMNANT = 0.3  # share of the random weights that a wired head keeps


def wire(model: TinyLlama) -> None:
    """Change the random weights of a new model in place; draws from torch's global generator.

    All embeddings get a common component `u`, which does not change tied logits' order. A wired
    head reads only `u` in q and k, with rotary phases such that the score peaks at its distance.
    """
    shape = model.shape
    embedding = model.embedding.weight.data
    shared = torch.randn(shape.hidden_size)
    shared /= shared.norm()
    embedding -= (embedding @ shared)[:, None] * shared
    embedding += _SHARED_PART * shared
    # The component along `shared` of an embedding after the first norm.
    reading = shared / (_SHARED_PART / embedding[0].norm() * shape.hidden_size**0.5)

    for layer, distances in zip(model.layers, WIRED_LAYERS, strict=False):
        _wire_heads(layer, distances, reading, rope_frequencies(shape))
        layer.out.weight.data.mul_((2 * shape.num_layers) ** 0.5)
    for i, layer in enumerate(model.layers[1:], start=1):
        num_wired = len(WIRED_LAYERS[i]) if i < len(WIRED_LAYERS) else 0
        _look_at_alike(layer, range(num_wired, shape.num_heads))


def _wire_heads(
    layer: Layer, distances: tuple[int, ...], reading: Tensor, frequencies: Tensor
) -> None:
    shape = layer.shape
    group, half = shape.num_heads // shape.num_kv_heads, shape.head_dim // 2
    fast = slice(0, _NUM_FREQUENCIES)
    strength = (_SHARPNESS * shape.head_dim**0.5) ** 0.5
    for kv_head in sorted({head // group for head in range(len(distances))}):
        k = torch.zeros(shape.head_dim)
        k[fast] = strength
        rows = _head_rows(layer, shape.num_heads + kv_head)
        rows.mul_(_REMNANT).add_(torch.outer(k, reading))
    for head, distance in enumerate(distances):
        phase = -distance * frequencies[fast]
        q = torch.zeros(shape.head_dim)
        q[fast] = strength * phase.cos()
        q[half : half + _NUM_FREQUENCIES] = strength * phase.sin()
        _head_rows(layer, head).mul_(_REMNANT).add_(torch.outer(q, reading))


def _look_at_alike(layer: Layer, heads: range) -> None:
    """Bias heads towards tokens like their own, by making q resemble k."""
    shape = layer.shape
    for head in heads:
        kv_head = shape.num_heads + head // (shape.num_heads // shape.num_kv_heads)
        _head_rows(layer, head).mul_(0.7).add_(_head_rows(layer, kv_head), alpha=0.7)


def _head_rows(layer: Layer, head: int) -> Tensor:
    """Rows of one head in the stacked q, k, v matrix; k heads follow the q heads."""
    size = layer.shape.head_dim
    return layer.qkv.weight.data[head * size : (head + 1) * size]
