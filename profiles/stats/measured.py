"""What a run has measured, before it is a profile: values alone, light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, TypeVar

import msgspec

from cachetree import Span
from cachetree.planning import EMap
from profiles.evidence import BaselineKind

MOST_SIZES: Final = 6
"""What there is of every size is measured at so many of them at most."""
NUM_SHOWN: Final = 8
"""Contexts of each task on which is measured what the gate does not ask about."""

T = TypeVar("T")


class Score(msgspec.Struct, frozen=True, array_like=True):
    """One question over one mixture."""

    kl: float
    """See `profiles.evidence.Fidelity` for its mean."""
    tv: float
    """Total variation, at the own answer's first tokens."""
    quality: float | None
    """None where it was not to be decoded."""


Scores = list[Sequence[Score]]
"""By context, then by question."""

Qualities = Sequence[Sequence[float]]
"""By context, then by question; no context is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is not the sender's KV: runs of layers, each recomputed from the sender's E, or a share
    of the tokens; nothing is full reuse. Or all layers but one are the receiver's own."""

    kind: BaselineKind | None = None
    """None for what nobody would do instead of a plan."""
    runs: tuple[Span, ...] = ()
    share: float = 0.0
    alone: int | None = None
    """The one layer whose KV is the sender's."""
    e_map: EMap | None = None
    """What corrects the sender's E; only of a plan, which is one run."""

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
        """Digest of what corrects E; empty where nothing does."""
        return "" if self.e_map is None else self.e_map.sha256

    @property
    def block(self) -> Span:
        """Of a plan."""
        return self.runs[0]

    def __len__(self) -> int:
        """Layers of its runs."""
        return sum(map(len, self.runs))

    def recomputed_layers(self, num_layers: int) -> float:
        return self.share * num_layers or len(self)


FULL_REUSE: Final = Candidate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured on one split, by context, then by question."""

    sender: list[Sequence[float]]
    """Quality of its own answers."""
    full_prefill: list[Sequence[float]]
    """The receiver's."""
    candidates: dict[Candidate, Scores]
    """Full reuse among them; each on all contexts, or on the first ones of each task, and without
    qualities where answers were not decoded."""

    @property
    def full_reuse(self) -> Scores:
        return self.candidates[FULL_REUSE]

    @property
    def layers(self) -> list[Scores]:
        """Of a sweep, by the layer whose KV alone is the sender's."""
        found = {it.alone: of for it, of in self.candidates.items() if it.alone is not None}
        return [found[layer] for layer in sorted(found)]

    @property
    def blocks(self) -> dict[Span, Scores]:
        """Of a sweep, by the layers that are recomputed, in their order."""
        found = {it.block: of for it, of in self.candidates.items() if it.runs}
        return {it: found[it] for it in sorted(found)}


def mean_of(values: Qualities) -> float:
    """Mean over contexts of the mean over each one's questions, as the gate weighs them."""
    return round(fmean(map(fmean, values)), 6)


def spread(values: Sequence[T], most: int = MOST_SIZES) -> list[T]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]
