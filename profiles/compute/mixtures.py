"""The receiver's forward over a question when each layer reads the KV of a source of its own.

A mixture says for every layer which source it reads: the sender's KV, the receiver's own, or what
a recompute made. Mixtures that agree up to a layer share the work up to there:

    layer      0  1  2  3  4  5
    [2, 4)     S  S  N  N  S  S     S  sender's       N  new, made from the sender's E at 2
    [2, 5)     S  S  N  N  N  S     the first four layers of the two are computed once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from profiles.compute.layered import GrowingKV, LayeredModel, PrefixKV

Mixture = tuple[int, ...]
"""Per layer, the index of a source."""


@torch.inference_mode()
def forced(
    model: LayeredModel,
    sources: Sequence[PrefixKV],
    mixtures: Sequence[Mixture],
    rows: Tensor,
    max_rows: int,
) -> list[Tensor]:
    """Run given tokens, `[rows, tokens]` right-padded, over every mixture.

    Returns for each mixture the residual stream after the last layer, `[rows, tokens, hidden]`.
    At most `max_rows` rows go through a layer at a time.
    """
    num_rows = rows.shape[0]
    num_past = next(kv[0].shape[2] for kv in sources[mixtures[0][0]] if kv is not None)
    placement = model.place(num_past, 0, rows.shape[1], [0])
    streams = [model.embed(rows)]
    at = [0] * len(mixtures)
    for layer in range(model.num_layers):
        reads = [(mixture[layer], at[i]) for i, mixture in enumerate(mixtures)]
        distinct = sorted(set(reads))
        fresh: list[Tensor] = []
        for source, group in groupby(distinct, key=itemgetter(0)):
            parts = torch.cat([streams[stream] for _, stream in group]).split(max_rows)
            past = model.kv_of(sources[source], layer)
            seen = GrowingKV(past, len(parts[0]), rows.shape[1])
            left = [model.step(layer, it, seen.begin(len(it)), placement) for it in parts]
            fresh.extend(torch.cat(left).split(num_rows))
        index = {read: i for i, read in enumerate(distinct)}
        streams, at = fresh, [index[read] for read in reads]
    return [streams[stream] for stream in at]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question over one mixture."""

    mixture: Mixture
    suffix: tuple[int, ...]


def decode(
    model: LayeredModel,
    sources: Sequence[PrefixKV],
    asked: Sequence[Asked],
    *,
    max_new: int,
    ends: frozenset[int],
    max_rows: int,
) -> list[list[int]]:
    """Greedy answers, in order; the token that ends one is its last."""
    answers: list[list[int]] = []
    for first in range(0, len(asked), max_rows):
        answers += _decode(model, sources, asked[first : first + max_rows], max_new, ends)
    return answers


@torch.inference_mode()
def _decode(
    model: LayeredModel,
    sources: Sequence[PrefixKV],
    asked: Sequence[Asked],
    max_new: int,
    ends: frozenset[int],
) -> list[list[int]]:
    """One batch. Suffixes are padded in front, so that all rows end at the same place."""
    length = max(len(it.suffix) for it in asked)
    padding = [length - len(it.suffix) for it in asked]
    ids = torch.tensor([[0] * n + list(it.suffix) for n, it in zip(padding, asked, strict=True)])
    readers = [_readers(it.mixture[layer] for it in asked) for layer in range(model.num_layers)]
    seen = {
        (layer, source): GrowingKV(
            model.kv_of(sources[source], layer), len(rows), length + max_new - 1
        )
        for layer, by_source in enumerate(readers)
        for source, rows in by_source.items()
    }
    num_past = next(kv[0].shape[2] for kv in sources[asked[0].mixture[0]] if kv is not None)
    num_tail = 0
    answers: list[list[int]] = [[] for _ in asked]
    for _ in range(max_new):
        hidden = model.embed(ids)
        placement = model.place(num_past, num_tail, ids.shape[1], padding)
        num_tail += ids.shape[1]
        for layer, by_source in enumerate(readers):
            leaving = torch.empty_like(hidden)
            for source, rows in by_source.items():
                leaving[rows] = model.step(
                    layer, hidden[rows], seen[layer, source], placement.of_rows(rows)
                )
            hidden = leaving
        ids = model.logits(hidden[:, -1:]).argmax(-1)
        for answer, token in zip(answers, ids[:, 0].tolist(), strict=True):
            if not answer or answer[-1] not in ends:
                answer.append(token)
        if all(answer[-1] in ends for answer in answers):
            break
    return answers


def _readers(sources: Iterable[int]) -> dict[int, list[int]]:
    """Rows by the source that they read."""
    rows: dict[int, list[int]] = {}
    for row, source in enumerate(sources):
        rows.setdefault(source, []).append(row)
    return rows
