"""Conclusions from several of a profile's numbers. Pure functions of a profile."""

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
"""Quality of full prefill below which the user should look at the data first."""
CRITICAL_SHARE: Final = 0.25
CRITICAL_KL: Final = 0.01
"""Least KL of a critical layer, in nats. The layer's KL must also be at least `CRITICAL_SHARE` of
the largest KL of any layer."""


def full_prefill_s(profile: MeasuredProfile) -> float:
    return profile.costs.full_prefill_s(*profile.held_out.mean_lengths)


def ttft_ratio(profile: MeasuredProfile, ttft_s: float) -> float:
    """Return a TTFT divided by full prefill's TTFT. Below 1, reuse saves time."""
    full_s = full_prefill_s(profile)
    return ttft_s / full_s if full_s else 1.0


def recommended(profile: MeasuredProfile) -> FrontierPoint | None:
    """Return the measurements of the recommended plan. None if no plan is recommended."""
    recommendation = profile.recommended
    if recommendation is None:
        return None
    same = (
        it
        for it in profile.frontier
        if (it.block, it.e_map) == (recommendation.block, recommendation.e_map)
    )
    return next(same, None)


def judged(profile: MeasuredProfile) -> FrontierPoint | None:
    """Return the plan that the verdict is about: the recommended plan, or else the first plan
    tried."""
    first = next((profile.frontier[place] for place in profile.order), None)
    return recommended(profile) or first


def moved_share(profile: MeasuredProfile, block: Span) -> float:
    """Return the bytes of KV and E that a plan with this block loads, as a share of all KV's bytes.
    Sender and receiver share no memory."""
    all_kv, _ = profile.costs.moved_bytes(())
    return sum(profile.costs.moved_bytes((block,))) / all_kv


def critical_layers(profile: MeasuredProfile) -> tuple[int, ...]:
    kl = {it.layer: it.fidelity.kl for it in profile.layers}
    least = max(CRITICAL_SHARE * max(kl.values(), default=0.0), CRITICAL_KL) - 1e-9
    return tuple(layer for layer, value in kl.items() if value >= least)


def within_tolerance(profile: MeasuredProfile) -> tuple[MeasuredBlock, ...]:
    """Return the blocks that lose no more than the tolerance on the training split."""
    floor = profile.train.full_prefill.mean * (1.0 - profile.tolerance)
    return tuple(it for it in profile.measured if it.quality is not None and it.quality >= floor)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer that is no plan of the frontier, such as full prefill."""

    kind: str
    name: str
    """Name of this way to answer. Ways of the same kind and size have different names."""
    quality: Interval
    full: float | None
    """Quality of full prefill on the same questions, if known."""
    layers: float | None
    """Work, as a number of the receiver's layers."""
    ttft_s: float | None
    runs: Sequence[tuple[int, int]] = ()
    fidelity: Fidelity | None = None


def ways(profile: MeasuredProfile) -> Iterator[Way]:
    """Yield full prefill, full reuse, the sender's own answers, and the baselines."""
    split, num_layers = profile.held_out, profile.receiver.num_layers
    reuse_s = profile.costs.ttft_s((), *split.mean_lengths)
    full, reuse, mean = "full prefill", "full reuse", split.full_prefill.mean
    yield Way(full, full, split.full_prefill, mean, num_layers, full_prefill_s(profile))
    yield Way(reuse, reuse, split.full_reuse, mean, 0, reuse_s)
    yield Way("sender", "sender alone", split.sender, mean, None, None)
    for other in profile.baselines:
        kind, layers = words.BASELINES[other.kind], other.recomputed_layers
        name = words.baseline(other)
        is_small = other.kind is BaselineKind.SMALL_MODEL
        same = mean if is_small else other.shown and other.shown.full_prefill
        yield Way(kind, name, other.quality, same, layers, other.ttft_s, other.runs, other.fidelity)


def shown_on(profile: MeasuredProfile) -> str:
    """Say on how many contexts the profiler measured plans that the gate does not judge."""
    shown = (it.shown for it in profile.baselines if it.shown)
    number, whole = next((it.num_contexts for it in shown), "few"), profile.held_out.num_contexts
    return f"{number} of the {whole:,} held-out contexts"


def next_steps(profile: MeasuredProfile) -> list[str]:
    """Say what to do about a pair if it did not pass, or if it passed and saves nothing."""
    steps = list[str]()
    quality = profile.full_prefill_quality
    if quality < LOW_QUALITY:
        steps.append(
            f"full prefill itself has only {words.quality(quality)}: look at template, data and "
            "metric first"
        )
    n, m = profile.held_out.mean_lengths
    if all(ttft_ratio(profile, it.ttft_s) >= 1 for it in profile.frontier):
        steps.append(
            f"no plan is faster than full prefill at {n:,} + {m:,} tokens: measure at the lengths "
            "that you serve"
        )
    plans = [profile.frontier[place] for place in profile.order]
    first = next(iter(plans[len(proven(plans, profile.tolerance)) :]), None)
    if profile.passed or first is None or nothing_to_lose(profile.held_out):
        return steps
    needed = contexts_lacking(first, profile.held_out, profile.tolerance)
    block = words.plan(first)
    if needed is None:
        steps.append(
            f"{block} loses more than {words.stated_percent(profile.tolerance)}: more data "
            "would not change that; try --e-correction, or accept more by --tolerance"
        )
    elif needed > MOST_CONTEXTS_NAMED:
        steps.append(f"no amount of data that you will have could prove {block}")
    else:
        most = f", with --most-contexts {needed}" if needed > MOST_CONTEXTS else ""
        steps.append(
            f"about {needed:,} held-out contexts of each task could prove {block}: give twice as "
            f"many in all{most}"
        )
    return steps
