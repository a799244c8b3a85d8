"""What a profile's numbers say when they are put together. Pure functions of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachetree import Span
from profiles.evidence import (
    BaselineKind,
    Fidelity,
    FrontierPoint,
    Interval,
    MeasuredBlock,
    MeasuredProfile,
)
from profiles.report import words
from profiles.stats.gate import (
    MOST_CONTEXTS,
    MOST_CONTEXTS_NAMED,
    contexts_lacking,
    nothing_to_lose,
    proven,
)

LOW_QUALITY: Final = 0.3
"""Of full prefill, below which the data are to be looked at first."""
CRITICAL_SHARE: Final = 0.25
CRITICAL_KL: Final = 0.01
"""A layer is critical if its KL is this share of the largest layer's, and so many nats."""


def full_prefill_s(profile: MeasuredProfile) -> float:
    return profile.costs.full_prefill_s(*profile.held_out.mean_lengths)


def ttft_ratio(profile: MeasuredProfile, ttft_s: float) -> float:
    """A TTFT by full prefill's; below 1 it saves time."""
    full_s = full_prefill_s(profile)
    return ttft_s / full_s if full_s else 1.0


def recommended(profile: MeasuredProfile) -> FrontierPoint | None:
    """The recommended plan, as it was measured: of its block, from E as it is or corrected by its
    map."""
    found = profile.recommended
    if found is None:
        return None
    same = (it for it in profile.frontier if (it.block, it.e_map) == (found.block, found.e_map))
    return next(same, None)


def judged(profile: MeasuredProfile) -> FrontierPoint | None:
    """What the verdict is about: the recommended plan, or else the first that was tried."""
    first = next((profile.frontier[place] for place in profile.order), None)
    return recommended(profile) or first


def moved_share(profile: MeasuredProfile, block: Span) -> float:
    """Bytes of KV and E that are loaded beside a block where sender and receiver share no pool, of
    all KV's."""
    all_kv, _ = profile.costs.moved_bytes(())
    return sum(profile.costs.moved_bytes((block,))) / all_kv


def critical_layers(profile: MeasuredProfile) -> tuple[int, ...]:
    kl = {it.layer: it.fidelity.kl for it in profile.layers}
    least = max(CRITICAL_SHARE * max(kl.values(), default=0.0), CRITICAL_KL) - 1e-9
    return tuple(layer for layer, value in kl.items() if value >= least)


def within_tolerance(profile: MeasuredProfile) -> tuple[MeasuredBlock, ...]:
    """Blocks that are good enough on the training split."""
    floor = profile.train.full_prefill.mean * (1.0 - profile.tolerance)
    return tuple(it for it in profile.measured if it.quality is not None and it.quality >= floor)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer, beside the frontier's plans."""

    kind: str
    name: str
    """By which it is told from others of its kind and size."""
    quality: Interval
    full: float | None
    """Full prefill's on the same questions, where that is known."""
    layers: float | None
    """Compute, in layers of the receiver."""
    ttft_s: float | None
    runs: Sequence[tuple[int, int]] = ()
    fidelity: Fidelity | None = None


def ways(profile: MeasuredProfile) -> Iterator[Way]:
    """What bounds the frontier, and what one could do instead of its plans."""
    split, num_layers = profile.held_out, profile.receiver.num_layers
    reuse_s = profile.costs.ttft_s((), *split.mean_lengths)
    full, reuse, mean = "full prefill", "full reuse", split.full_prefill.mean
    yield Way(full, full, split.full_prefill, mean, num_layers, full_prefill_s(profile))
    yield Way(reuse, reuse, split.full_reuse, mean, 0, reuse_s)
    yield Way("sender", "sender alone", split.sender, mean, None, None)
    for it in profile.baselines:
        kind, layers = words.BASELINES[it.kind], it.recomputed_layers
        name = words.baseline(it)
        is_small = it.kind is BaselineKind.SMALL_MODEL
        same = mean if is_small else it.shown and it.shown.full_prefill
        yield Way(kind, name, it.quality, same, layers, it.ttft_s, it.runs, it.fidelity)


def shown_on(profile: MeasuredProfile) -> str:
    """On how many contexts was measured what the gate does not ask about."""
    shown = (it.shown for it in profile.baselines if it.shown)
    number, whole = next((it.num_contexts for it in shown), "few"), profile.held_out.num_contexts
    return f"{number} of the {whole:,} held-out contexts"


def next_steps(profile: MeasuredProfile) -> list[str]:
    """What to do about a pair that did not pass, or that passed and saves nothing."""
    found = list[str]()
    quality = profile.full_prefill_quality
    if quality < LOW_QUALITY:
        found.append(
            f"full prefill itself has only {words.quality(quality)}: look at template, data and "
            "metric first"
        )
    n, m = profile.held_out.mean_lengths
    if all(ttft_ratio(profile, it.ttft_s) >= 1 for it in profile.frontier):
        found.append(
            f"no plan is faster than full prefill at {n:,} + {m:,} tokens: measure at the lengths "
            "that you serve"
        )
    plans = [profile.frontier[place] for place in profile.order]
    first = next(iter(plans[len(proven(plans, profile.tolerance)) :]), None)
    if profile.passed or first is None or nothing_to_lose(profile.held_out):
        return found
    needed = contexts_lacking(first, profile.held_out, profile.tolerance)
    block = words.plan(first)
    if needed is None:
        found.append(
            f"{block} loses more than {words.stated_percent(profile.tolerance)}: more data "
            "would not change that; try --e-correction, or accept more by --tolerance"
        )
    elif needed > MOST_CONTEXTS_NAMED:
        found.append(f"no amount of data that you will have could prove {block}")
    else:
        most = f", with --most-contexts {needed}" if needed > MOST_CONTEXTS else ""
        found.append(
            f"about {needed:,} held-out contexts of each task could prove {block}: give twice as "
            f"many in all{most}"
        )
    return found
