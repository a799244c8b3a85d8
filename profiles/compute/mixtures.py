"""Run the receiver over a question while each layer reads the KV of its own source.

A mixture names a source for every layer: the sender's KV, the receiver's own KV, or KV of a
recomputed block. Mixtures that agree up to a layer share the work up to that layer:

    layer      0  1  2  3  4  5
    [2, 4)     S  S  N  N  S  S     S  sender's       N  new, made from the sender's E at 2
    [2, 5)     S  S  N  N  N  S     the first four layers of the two are computed once

Decoding is speculative: each row (one answer) may have a draft, a guess of the whole answer. One
pass through the layers checks several tokens of each draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter

import torch
from torch import Tensor

from profiles.compute.layered import GrowingKV, LayeredModel, PrefixKV

Mixture = tuple[int, ...]
"""Index of the source of each layer's KV."""


@torch.inference_mode()
def forced(
    model: LayeredModel,
    sources: Sequence[PrefixKV],
    mixtures: Sequence[Mixture],
    texts: Sequence[Sequence[int]],
    max_rows: int,
) -> list[Tensor]:
    """Run known texts over every mixture of KV, without decoding.

    Returns for each mixture the residual stream after the last layer, `[texts, tokens, hidden]`.
    Values at the padding of shorter texts mean nothing. At most `max_rows` texts go through a layer
    at a time.
    """
    num_past = next(kv[0].shape[2] for kv in sources[mixtures[0][0]] if kv is not None)
    placement = model.place(num_past, [0] * len(texts), list(map(len, texts)))
    streams = [model.embed(_padded(texts))]
    num_rows, num_places = streams[0].shape[:2]
    at = [0] * len(mixtures)
    for layer in range(model.num_layers):
        reads = [(mixture[layer], at[i]) for i, mixture in enumerate(mixtures)]
        distinct = sorted(set(reads))
        fresh: list[Tensor] = []
        for source, group in groupby(distinct, key=itemgetter(0)):
            entering = torch.cat([streams[stream] for _, stream in group])
            parts = torch.arange(len(entering)).split(max_rows)
            past = model.kv_of(sources[source], layer)
            seen = GrowingKV(past, len(parts[0]), num_places)
            left = [
                model.step(layer, entering[it], seen, placement.of_rows(it % num_rows))
                for it in parts
            ]
            fresh.extend(torch.cat(left).split(num_rows))
        index = {read: i for i, read in enumerate(distinct)}
        streams, at = fresh, [index[read] for read in reads]
    return [streams[stream] for stream in at]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to answer over one mixture of KV."""

    mixture: Mixture
    suffix: tuple[int, ...]
    draft: tuple[int, ...] = ()
    """Guess of the answer, so that fewer passes are needed. It does not change the answer."""


def decode(
    model: LayeredModel,
    sources: Sequence[PrefixKV],
    asked: Sequence[Asked],
    *,
    max_new: int,
    ends: frozenset[int],
    max_rows: int,
) -> list[list[int]]:
    """Return greedy answers, in the questions' order. A complete answer includes its end token.

    At most `max_rows` answers are decoded together, and at most `max_rows` next-token distributions
    exist at a time.
    """
    answers: list[list[int]] = []
    for first in range(0, len(asked), max_rows):
        rows = [_Row(it, max_new, ends) for it in asked[first : first + max_rows]]
        _decode(model, sources, rows, max_rows)
        answers += [row.answer for row in rows]
    return answers


class _Row:
    """One answer during decoding: its tokens so far, and its tokens in the next pass (`given`).

    `given` has known tokens that have not gone through the layers, then guesses from the draft.
    """

    def __init__(self, asked: Asked, max_new: int, ends: frozenset[int]) -> None:
        self.mixture, self.answer = asked.mixture, list[int]()
        self.given = [*asked.suffix, *asked.draft[: max_new - 1]]
        self.num_known = len(asked.suffix)
        """Number of tokens in `given` that are known. The other tokens are guesses."""
        self.num_kept = 0
        """Number of right tokens that have gone through the layers."""
        self.most = len(asked.suffix) + max_new
        self._draft, self._place, self._max_new, self._ends = asked.draft, 0, max_new, ends

    def take(self, chosen: Sequence[int]) -> None:
        """Append `chosen`, the most likely tokens, until one of them differs from its guess."""
        guessed = [*self.given[self.num_known :], None]
        right = 0
        for token, guess in zip(chosen, guessed, strict=True):
            self.answer.append(token)
            if token in self._ends or len(self.answer) == self._max_new:
                self.given = []
                return
            if token != guess:
                break
            right += 1
        self.num_kept += self.num_known + right
        # Continue the draft behind its nearest token that equals the last one. Without such a
        # token, continue behind the old place.
        place, last = self._place + right, self.answer[-1]
        places = [i for i, it in enumerate(self._draft) if it == last]
        self._place = min(places, key=lambda i: abs(i - place), default=place) + 1
        most = min(2 * right + 1, self._max_new - len(self.answer) - 1)
        self.given = [self.answer[-1], *self._draft[self._place :][:most]]
        self.num_known = 1


@torch.inference_mode()
def _decode(
    model: LayeredModel, sources: Sequence[PrefixKV], rows: Sequence[_Row], max_rows: int
) -> None:
    """Fill `answer` of every row with greedy tokens. Each pass through the layers takes `given` of
    all rows, and keeps right guesses. At most `max_rows` distributions exist at a time."""
    # For each layer: the rows that read each source.
    readers: list[dict[int, list[int]]] = [{} for _ in range(model.num_layers)]
    for index, row in enumerate(rows):
        for by_source, source in zip(readers, row.mixture, strict=True):
            by_source.setdefault(source, []).append(index)
    seen = {
        (layer, source): GrowingKV(
            model.kv_of(sources[source], layer), len(reading), max(it.most for it in rows)
        )
        for layer, by_source in enumerate(readers)
        for source, reading in by_source.items()
    }
    num_past = next(kv[0].shape[2] for kv in sources[rows[0].mixture[0]] if kv is not None)
    while any(num_given := [len(row.given) for row in rows]):
        hidden = model.embed(_padded([row.given for row in rows]))
        placement = model.place(num_past, [row.num_kept for row in rows], num_given)
        for layer, by_source in enumerate(readers):
            leaving = torch.empty_like(hidden)
            for source, reading in by_source.items():
                leaving[reading] = model.step(
                    layer,
                    hidden[reading],
                    seen[layer, source],
                    placement.of_rows(torch.tensor(reading)),
                )
            hidden = leaving
        places = [
            (i, place)
            for i, row in enumerate(rows)
            for place in range(row.num_known - 1, num_given[i])
        ]
        ahead = torch.tensor(places, device=model.device).split(max_rows)
        chosen = [model.logits(hidden[it[:, 0], it[:, 1]]).argmax(-1).tolist() for it in ahead]
        tokens = iter(chain.from_iterable(chosen))
        for i, row in enumerate(rows):
            if row.given:
                row.take(list(islice(tokens, num_given[i] - row.num_known + 1)))


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return `[rows, tokens]`, with padding at the end of each row."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
