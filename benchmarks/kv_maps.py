"""A baseline: linear maps from the sender's KV to the receiver's, with nothing recomputed.

As in arXiv 2608.03893, each layer has one ridge regression. Its input is the sender's keys and
values of that layer and its neighbours. Keys are mapped without their rotation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from profiles.compute.layered import KV, LayeredModel

NEIGHBOURS: Final = 2
"""Layers on either side that a map reads."""
PENALTY: Final = 0.01
"""Ridge penalty, relative to the mean square of a column."""


class KVMaps:
    """A linear map for each layer: a matrix `[columns of the layers read + 1, columns of a layer]`.
    The sender's KV plus the map's output approximates the receiver's."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = matrices

    @classmethod
    def fit(cls, model: LayeredModel, pairs: Iterable[tuple[Sequence[KV], Sequence[KV]]]) -> KVMaps:
        """Fit the maps to pairs of the sender's and the receiver's KV of the same documents."""
        sums: list[Tensor] = []
        for theirs, ours in pairs:
            read, wanted = _rows(model, theirs), _rows(model, ours)
            for layer in range(model.num_layers):
                x = _columns(read, layer)
                products = x.T @ torch.cat([x, wanted[layer] - read[layer]], 1)
                if layer < len(sums):
                    sums[layer] += products
                else:
                    sums.append(products)
        return cls([_solved(it) for it in sums])

    def __call__(self, model: LayeredModel, theirs: Sequence[KV]) -> list[KV]:
        read = _rows(model, theirs)
        rows = [
            it + _columns(read, layer) @ matrix
            for layer, (it, matrix) in enumerate(zip(read, self.matrices, strict=True))
        ]
        cos, sin = _rotation(model, len(rows[0]))
        return [
            (_turned(keys, cos, sin), values)
            for keys, values in (_unflat(it, theirs[0][0].shape) for it in rows)
        ]


def _rows(model: LayeredModel, kv: Sequence[KV]) -> list[Tensor]:
    """Flatten each layer to `[tokens, 2 * kv_heads * head_dim]`: keys without rotation, and
    values."""
    cos, sin = _rotation(model, kv[0][0].shape[2])
    return [
        torch.cat([it[0].transpose(0, 1).flatten(1) for it in (_turned(k, cos, -sin), v)], 1)
        for k, v in kv
    ]


def _unflat(rows: Tensor, shape: Sequence[int]) -> KV:
    _, heads, tokens, size = shape
    keys, values = (it.view(tokens, heads, size).transpose(0, 1)[None] for it in rows.chunk(2, 1))
    return keys, values


def _columns(read: Sequence[Tensor], layer: int) -> Tensor:
    near = read[max(0, layer - NEIGHBOURS) : layer + NEIGHBOURS + 1]
    return torch.cat([*near, torch.ones(len(near[0]), 1)], 1)


def _solved(sums: Tensor) -> Tensor:
    size = sums.shape[0]
    x_x, x_d = sums[:, :size].double(), sums[:, size:].double()
    ridge = PENALTY * x_x.diagonal().mean() * torch.eye(size, dtype=x_x.dtype)
    return torch.linalg.solve(x_x + ridge, x_d).float().contiguous()


def _rotation(model: LayeredModel, num_tokens: int) -> tuple[Tensor, Tensor]:
    cos, sin = model.model.model.rotary_emb(torch.empty(0), torch.arange(num_tokens)[None])
    return cos[:, None], sin[:, None]


def _turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = keys.chunk(2, -1)
    return keys * cos + torch.cat([-second, first], -1) * sin
