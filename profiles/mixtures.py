"""The receiver's forward over a question when each layer reads the KV of a source of its own.

A mixture says for every layer which source it reads: the sender's KV, the receiver's own, or what
a recompute made. Mixtures that agree up to a layer share the work up to there:

    layer      0  1  2  3  4  5
    [2, 4)     S  S  N  N  S  S     S  sender's       N  new, made from the sender's E at 2
    [2, 5)     S  S  N  N  N  S     the first four layers of the two are computed once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from profiles.layered import KV, LayeredModel, Source

Mixture = tuple[int, ...]
"""Per layer, the index of a source."""


@torch.inference_mode()
def forced(
    model: LayeredModel,
    sources: Sequence[Source],
    mixtures: Sequence[Mixture],
    rows: Tensor,
    max_rows: int,
) -> list[Tensor]:
    """Run given tokens, `[rows, tokens]` right-padded, over every mixture.

    Returns for each mixture the residual stream after the last layer, `[rows, tokens, hidden]`.
    At most `max_rows` rows go through a layer at a time.
    """
    streams = [model.embed(rows)]
    at = [0] * len(mixtures)
    for layer in range(model.num_layers):
        reads = [(at[i], mixture[layer]) for i, mixture in enumerate(mixtures)]
        distinct = sorted(set(reads), key=lambda it: (it[1], it[0]))
        fresh: list[Tensor] = []
        for source in sorted({source for _, source in distinct}):
            nodes = [node for node, its_source in distinct if its_source == source]
            hidden = torch.cat([streams[node] for node in nodes])
            left = _through(model, layer, hidden, sources[source][layer], max_rows)
            fresh.extend(left.split(rows.shape[0]))
        index = {read: i for i, read in enumerate(distinct)}
        streams, at = fresh, [index[read] for read in reads]
    return [streams[node] for node in at]


def _through(
    model: LayeredModel, layer: int, hidden: Tensor, past: KV | None, max_rows: int
) -> Tensor:
    if past is None:
        raise ValueError(f"a mixture reads layer {layer} of a source that lacks it")
    parts = [model.step(layer, part, past, None, 0)[0] for part in hidden.split(max_rows)]
    return torch.cat(parts)


@torch.inference_mode()
def decode(
    model: LayeredModel,
    sources: Sequence[Source],
    mixtures: Sequence[Mixture],
    suffix: Sequence[int],
    *,
    max_new: int,
    ends: frozenset[int],
    max_rows: int,
) -> list[list[int]]:
    """Greedy answers to one question, one per mixture; the token that ended one is its last."""
    answers: list[list[int]] = []
    for first in range(0, len(mixtures), max_rows):
        part = mixtures[first : first + max_rows]
        answers.extend(_decode(model, sources, part, suffix, max_new, ends))
    return answers


def _decode(
    model: LayeredModel,
    sources: Sequence[Source],
    mixtures: Sequence[Mixture],
    suffix: Sequence[int],
    max_new: int,
    ends: frozenset[int],
) -> list[list[int]]:
    groups = [_by_source(it[layer] for it in mixtures) for layer in range(model.num_layers)]
    tails: dict[tuple[int, int], KV] = {}
    answers: list[list[int]] = [[] for _ in mixtures]
    ids = torch.tensor([list(suffix)]).expand(len(mixtures), -1)
    num_tail = 0
    for _ in range(max_new):
        hidden = model.embed(ids)
        for layer, by_source in enumerate(groups):
            leaving = torch.empty_like(hidden)
            for source, members in by_source.items():
                past, key = sources[source][layer], (layer, source)
                if past is None:
                    raise ValueError(f"a mixture reads layer {layer} of a source that lacks it")
                leaving[members], tails[key] = model.step(
                    layer, hidden[members], past, tails.get(key), num_tail
                )
            hidden = leaving
        num_tail += ids.shape[1]
        ids = model.logits(hidden[:, -1:]).argmax(-1)
        for answer, token in zip(answers, ids[:, 0].tolist(), strict=True):
            if not answer or answer[-1] not in ends:
                answer.append(token)
        if all(answer[-1] in ends for answer in answers):
            break
    return answers


def _by_source(sources: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for row, source in enumerate(sources):
        groups.setdefault(source, []).append(row)
    return groups
