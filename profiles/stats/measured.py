"""What a run has measured, before it is a profile: values alone, light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from cachetree import Span
from cachetree.planning import EMap
from profiles.evidence import BaselineKind

MOST_SIZES: Final = 6
"""What there is of every size is measured at so many of them at most."""

T = TypeVar("T")


class Score(msgspec.Struct, frozen=True, array_like=True):
    """One question over one mixture; see `profiles.evidence.Fidelity` for the means of these."""

    kl: float
    agreement: float
    own_nll: float
    reference_nll: float
    quality: float | None
    """None where it was not to be decoded."""
    tv: float = 0.0
    """Total variation, at the own answer's first tokens; 0 in journals of before it was
    measured."""


Scores = list[Sequence[Score]]
"""By context, then by question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Every block, on the training split or on some contexts of each of its tasks."""

    sender: list[Sequence[float]]
    """Quality by context, then by question."""
    full_prefill: list[Sequence[float]]
    full_reuse: Scores
    layers: list[Scores]
    """By the layer whose KV alone is the sender's."""
    blocks: dict[Span, Scores]
    """Without qualities, and so are `layers`, where answers were not decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is recomputed: runs of layers, each from the sender's E, or a share of the tokens."""

    kind: BaselineKind | None = None
    """None for a plan of the frontier."""
    runs: tuple[Span, ...] = ()
    share: float = 0.0
    e_map: EMap | None = None
    """What corrects the sender's E; only of a plan, which is one run."""

    @property
    def name(self) -> str:
        if self.share:
            return f"tokens:{self.share:.4f}"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Plans on one split, by context, then by question."""

    sender: list[Sequence[float]]
    full_prefill: list[Sequence[float]]
    full_reuse: list[Sequence[Score]]
    candidates: dict[Candidate, list[Sequence[Score]]]
    """On all contexts, or on the first ones of each task."""


def spread(values: Sequence[T], most: int = MOST_SIZES) -> list[T]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]
