"""Measurements of one pair, before they become a profile: only values, light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, TypeVar

import msgspec

from cachetree import EMPTY_SPAN, Span
from cachetree.planning import EMap
from profiles.evidence import BaselineKind

MOST_SIZES: Final = 6
"""Largest number of sizes, in layers, at which a baseline is measured."""
NUM_SHOWN: Final = 8
"""Number of contexts of each task for baselines, and for plans that the gate does not try."""

T = TypeVar("T")


class Score(msgspec.Struct, frozen=True, array_like=True):
    """Score of one question, answered over one mixture of KV."""

    kl: float
    """Mean KL divergence from full prefill, along full prefill's answer."""
    tv: float
    """Total variation distance from full prefill, at the first tokens of full prefill's answer."""
    quality: float | None
    """None if the question was not decoded."""


Scores = list[Sequence[Score]]
"""Scores by context, then by question."""

Qualities = Sequence[Sequence[float]]
"""Qualities by context, then by question; no context is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan or baseline. It says which KV the receiver computes itself: runs of layers from the
    sender's E (`runs`), a share of the tokens (`share`), all layers except one (`alone`), or none
    (full reuse)."""

    kind: BaselineKind | None = None
    """Kind of baseline. None for a plan, for full reuse, and for a single layer."""
    runs: tuple[Span, ...] = ()
    share: float = 0.0
    alone: int | None = None
    """The layer that reads the sender's KV, if all other layers read the receiver's own."""
    e_map: EMap | None = None
    """Map that corrects the sender's E. Only a plan can have one, and such a plan has one run."""

    @property
    def name(self) -> str:
        if self.share:
            return f"tokens:{self.share:.4f}"
        if self.alone is not None:
            return f"alone:{self.alone}"
        corrected = f"+{self.map_sha256[:16]}" if self.map_sha256 else ""
        return "layers:" + ",".join(f"{run.start}-{run.stop}" for run in self.runs) + corrected

    @property
    def map_sha256(self) -> str:
        """Digest of the map that corrects E. Empty without a map."""
        return "" if self.e_map is None else self.e_map.sha256

    @property
    def block(self) -> Span:
        """The only run of a plan."""
        return self.runs[0]

    def __len__(self) -> int:
        """Number of layers in all runs."""
        return sum(map(len, self.runs))

    def recomputed_layers(self, num_layers: int) -> float:
        return self.share * num_layers or len(self)


FULL_REUSE: Final = Candidate()
NO_BLOCK: Final = Candidate(runs=(EMPTY_SPAN,))
"""Full reuse, in the form of a plan that the gate may try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one split: for each context, then for each question."""

    sender: list[Sequence[float]]
    """Quality of the sender's answers over its own KV."""
    full_prefill: list[Sequence[float]]
    """Quality of the receiver's answers over its own KV."""
    candidates: dict[Candidate, Scores]
    """Scores of full reuse and other candidates, on all contexts or on the first of each task.
    Answers that were not decoded have no quality."""

    @property
    def full_reuse(self) -> Scores:
        return self.candidates[FULL_REUSE]

    @property
    def layers(self) -> list[Scores]:
        """Scores of full reuse of a single layer, in the order of layers."""
        scores_of = {it.alone: of for it, of in self.candidates.items() if it.alone is not None}
        return [scores_of[layer] for layer in sorted(scores_of)]

    @property
    def blocks(self) -> dict[Span, Scores]:
        """Scores of blocks by the recomputed layers, sorted by start, then by stop."""
        scores_of = {it.block: of for it, of in self.candidates.items() if it.runs}
        return {it: scores_of[it] for it in sorted(scores_of)}


def mean_of(values: Qualities) -> float:
    """Mean over contexts of each context's mean over its questions. The gate weighs contexts in the
    same way."""
    return round(fmean(map(fmean, values)), 6)


def spread(values: Sequence[T], most: int = MOST_SIZES) -> list[T]:
    """Choose at most `most` values, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]
