"""The gate: may a pair be reused? Judged on data that had no part in choosing. Pure.

Of a plan is asked, at every task: is the share of full prefill's quality that it loses within the
tolerance? Questions about one context share its KV, so contexts are the draws.

    a plan at a task   passes as soon as bets against "it loses more than the tolerance" have
                       multiplied the stake by 1 / ERROR_RATE, context after context in an order
                       that was fixed before. If the loss is more, no stake grows on average, so by
                       Ville's inequality that ever happens with at most ERROR_RATE: for any number
                       of contexts, whenever one stops or goes on, whatever the distribution within
                       0 and 1, rare losses and full prefill's own scatter included (Waudby-Smith
                       and Ramdas, 2024). A context's quality is the mean over its questions: all
                       contexts weigh the same
    a plan             passes where it does at every task. One that loses too much has a task at
                       which it does, so each task gets the whole ERROR_RATE
    a profile          tries plans in the training split's order, from most work to least, and stops
                       at the first that fails: that any plan among those before it loses too much
                       has at most ERROR_RATE, because the first such plan would have to pass
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import ceil, log
from statistics import fmean
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from profiles.evidence import FrontierPoint, Interval, Split, TaskLoss, TaskScores
from profiles.stats.measured import Qualities

ERROR_RATE: Final = 0.05
"""Of wrongly passed profiles, at most."""
DRIFT_ERROR_RATE: Final = 0.01
"""Of bounds that the drift guard goes by."""
CONTROL_SHARE: Final = 0.5
"""Share of full prefill's quality. A task that keeps more without its documents judges nothing."""
NUM_SAMPLES: Final = 10_000
_AT_ONCE: Final = 100
"""Samples that are in memory, about 24 bytes for each of their contexts."""
_SEED: Final = 0

_BETS: Final = np.array([0.95, 0.8, 0.5, 0.25])
"""Shares of what may be bet at most; a context on which all is lost takes as much. None is 1, which
one such context would ruin."""
_STAKES: Final = np.array([0.4, 0.35, 0.15, 0.1])
"""Put on each at the start: 1 together."""
_STEPS: Final = 1_000_000
"""Bounds are shares in so many steps."""

MOST_CONTEXTS: Final = 300
"""Contexts of a task that judge, at most, if nothing else is asked for."""
MOST_CONTEXTS_NAMED: Final = 3_000
"""Contexts beyond which no number is said."""


def interval(values: Qualities) -> Interval:
    """Mean over contexts, and its 95 % interval by a bootstrap of contexts, to look at."""
    of_contexts = _means(values)
    mean = float(of_contexts.mean())
    rng, means = np.random.default_rng(_SEED), []
    for _ in range(NUM_SAMPLES // _AT_ONCE):
        drawn = rng.integers(len(values), size=(_AT_ONCE, len(values)))
        means.append(of_contexts[drawn].mean(1))
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(
        mean=round(mean, 6),
        low=round(min(float(low), mean), 6),
        high=round(max(float(high), mean), 6),
    )


def loss_bound(full: Qualities, plan: Qualities, error_rate: float = ERROR_RATE) -> float:
    """The share of full prefill's quality that the plan loses at most, but for `error_rate`; the
    smallest tolerance at which it passes, and 1 where full prefill has no quality to lose."""
    ours, theirs = _means(full), _means(plan)
    if not ours.any():
        return 1.0

    def has_won(step: int) -> bool:
        return bool((_wealth(ours, theirs, step / _STEPS) >= -log(error_rate)).any())

    return bisect_left(range(_STEPS), True, key=has_won) / _STEPS


def proven_after(full: Qualities, plan: Qualities, tolerance: float) -> int | None:
    """Number of contexts after which the plan passes; None if it does not."""
    has_won = _wealth(_means(full), _means(plan), tolerance) >= -log(ERROR_RATE)
    return int(has_won.argmax()) + 1 if has_won.any() else None


def still_open(
    full: Qualities,
    plans: Sequence[Qualities],
    tasks: Sequence[int],
    tolerance: float,
    most: int,
) -> list[int]:
    """Places of the plans that the next context is asked about, in the order in which they are
    tried. Each plan has the qualities of the first contexts, as many as it was asked about; `tasks`
    has the task of every context that there is.

    A plan ends as soon as it is proven at every task. It also ends if it would not be proven though
    it lost nothing from here to `most` contexts of each task. Plans behind it are then not tried.
    """
    found: list[int] = []
    for place, plan in enumerate(plans):
        is_proven = True
        for task in {*tasks}:
            asked = [it for it in range(len(plan)) if tasks[it] == task]
            ours, theirs = [full[it] for it in asked], [plan[it] for it in asked]
            if proven_after(ours, theirs, tolerance) is not None:
                continue
            rest = [[1.0]] * (most - len(asked))
            if proven_after(ours + rest, theirs + rest, tolerance) is None:
                return found
            is_proven = False
        if not is_proven:
            found.append(place)
    return found


def mean_bound(values: Qualities, error_rate: float) -> float:
    """What the mean of values in [0, 1] is at most, but for `error_rate`."""
    kept = [[1.0 - it for it in context] for context in values]
    return loss_bound([[1.0] * len(it) for it in values], kept, error_rate)


def contexts_needed(full: Qualities, plan: Qualities, tolerance: float) -> int | None:
    """How many contexts like these would pass; None where no number of them does.

    As many as a plan that loses nothing needs, at least: being better than that was luck.
    """
    ours, theirs = _means(full), _means(plan)
    least, needed = (_num_passing(_gains(ours, it, tolerance).mean(1)) for it in (ours, theirs))
    return None if least is None or needed is None else max(least, needed)


def _num_passing(gains: NDArray[np.float64]) -> int | None:
    """Contexts until a mixture whose bets gain so much at each passes."""
    if gains.max() <= 0:
        return None
    enough = ceil(-log(ERROR_RATE * _STAKES[gains.argmax()]) / gains.max())
    return bisect_left(range(enough), -log(ERROR_RATE), key=lambda it: _together(it * gains))


def _means(values: Qualities) -> NDArray[np.float64]:
    """Of each context."""
    return np.array([fmean(it) for it in values], dtype=np.float64)


def _gains(
    full: NDArray[np.float64], plan: NDArray[np.float64], tolerance: float
) -> NDArray[np.float64]:
    """Logarithm of what each context multiplies each bet's stake by, by bet.

    Where the plan keeps less than 1 - tolerance of full prefill's quality, the mean of `lost` is
    above 0; no context's is above 1.
    """
    lost = full - plan / (1 - tolerance)
    return np.log1p(np.outer(_BETS, -lost))


def _wealth(
    full: NDArray[np.float64], plan: NDArray[np.float64], tolerance: float
) -> NDArray[np.float64]:
    """Logarithm of all stakes together after each context."""
    return _together(_gains(full, plan, tolerance).cumsum(1).T)


def _together(won: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of all stakes, each multiplied by what its bet, on the last axis, has won."""
    return np.logaddexp.reduce(np.log(_STAKES) + won, axis=-1)


def is_within(losses: Sequence[TaskLoss], tolerance: float) -> bool:
    """A receiver that answers nothing right has nothing to lose, and proves nothing."""
    return bool(losses) and all(it.bound <= tolerance for it in losses)


def proven(plans: Iterable[FrontierPoint], tolerance: float) -> tuple[FrontierPoint, ...]:
    """Of plans in the order in which they are tried, those before the first that fails."""
    return tuple(takewhile(lambda it: is_within(it.tasks, tolerance), plans))


def verdict(plans: Sequence[FrontierPoint], split: Split, tolerance: float) -> tuple[bool, str]:
    """Whether the pair passes with these plans in their order, and why, in one sentence."""
    if (unjudged := nothing_to_lose(split)) is not None:
        return False, unjudged
    if not plans:
        return False, "no plan smaller than all layers was measured on all training questions"
    if passing := proven(plans, tolerance):
        return True, reason_of(passing[-1], split, tolerance)
    return False, f"no plan smaller than all layers passed: {reason_of(plans[0], split, tolerance)}"


def nothing_to_lose(split: Split) -> str | None:
    """Of a split at whose tasks no loss can be judged: why, in a sentence."""
    for it in split.tasks:
        if it.full_prefill <= 0:
            return (
                f"the receiver alone answers nothing right on held-out questions{_of(it, split)}, "
                "so no loss can be judged; check data, template and metric"
            )
        for arm, kept in _arms(it):
            if kept > CONTROL_SHARE:
                return (
                    f"{arm} full prefill keeps {kept:.0%} of its quality on held-out questions"
                    f"{_of(it, split)}, so this task cannot judge reuse; ask what only the "
                    "document answers"
                )
    return None


def controls_of(split: Split) -> str:
    """Of each task that has controls, what they keep, in a sentence."""
    said = (
        f"{' and '.join(f'{arm} {kept:.0%}' for arm, kept in arms)} of full prefill's quality is "
        f"left{_of(it, split)}{_repeated(it)}"
        for it in split.tasks
        if (arms := _arms(it))
    )
    return "; ".join(said)


def _repeated(task: TaskScores) -> str:
    """What rounding does to a comparison of answers."""
    if task.controls is None or (share := task.controls.in_two_parts) is None:
        return ""
    return f", and full prefill in two parts gives {share:.0%} of its own answers"


def _arms(task: TaskScores) -> list[tuple[str, float]]:
    """Share of full prefill's quality that each control keeps."""
    if task.controls is None or not task.controls.full_prefill:
        return []
    whole, it = task.controls.full_prefill, task.controls
    return [
        ("without the document", it.no_document / whole),
        ("with another document", it.other_document / whole),
    ]


def _as_judged(task: TaskScores, lost: TaskLoss) -> TaskScores:
    """A task on the contexts that a plan was judged on."""
    if lost.num_contexts is None or lost.full_prefill is None:
        return task
    return replace(task, num_contexts=lost.num_contexts, full_prefill=lost.full_prefill)


def reason_of(plan: FrontierPoint, split: Split, tolerance: float) -> str:
    """Why a plan passes or does not, in a sentence."""
    reason = f"{finding(plan, split)}; {100 * tolerance:.3g}% is accepted"
    if is_within(plan.tasks, tolerance):
        return reason
    if (needed := contexts_lacking(plan, split, tolerance)) is not None:
        task, _ = _worst(plan, split)
        many = f"about {needed} such contexts could show it, not {task.num_contexts}"
        none = "no amount of data that you will have could show it"
        reason += f"; {many if needed <= MOST_CONTEXTS_NAMED else none}"
    return reason


def contexts_lacking(plan: FrontierPoint, split: Split, tolerance: float) -> int | None:
    """Of a plan that did not pass: how many contexts like those of the task least sure would show
    that it does; None where at some task it loses too much, or none would show it."""
    for task, lost in zip(split.tasks, plan.tasks, strict=True):
        is_good = lost.quality >= (1 - tolerance) * _as_judged(task, lost).full_prefill
        if lost.bound > tolerance and (lost.needed is None or not is_good):
            return None
    return _worst(plan, split)[1].needed


def finding(plan: FrontierPoint, split: Split) -> str:
    """What a plan loses, in a sentence; where there are several tasks, at the one least sure."""
    task, lost = _worst(plan, split)
    corrected = "" if plan.e_map is None else " with corrected E"
    most = percent_at_most(lost.bound)
    return (
        f"the plan [{plan.start}, {plan.stop}){corrected} has {lost.quality:.3f} where full "
        f"prefill has {task.full_prefill:.3f} on held-out questions{_of(task, split)}, so that "
        f"with {1 - ERROR_RATE:.0%} confidence it loses {most:.1f}% of that at most"
    )


def percent_at_most(share: float) -> float:
    """Rounded up to a tenth: a bound that exceeds what is accepted is not told as if it did not."""
    return ceil(round(1000 * share, 6)) / 10


def _worst(plan: FrontierPoint, split: Split) -> tuple[TaskScores, TaskLoss]:
    """The task at which least is sure."""
    pairs = zip(split.tasks, plan.tasks, strict=True)
    task, lost = max(pairs, key=lambda it: it[1].bound)
    return _as_judged(task, lost), lost


def _of(task: TaskScores, split: Split) -> str:
    return f" of {task.name}" if len(split.tasks) > 1 else ""
