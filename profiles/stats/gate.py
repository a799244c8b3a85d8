"""The gate decides whether a pair may be reused. Pure: no models, no devices, no clocks.

A plan is one way to reuse the sender's KV. The gate asks at every task: does the plan lose more of
full prefill's quality than the tolerance accepts? A plan passes only if held-out data prove that it
does not. The proof is wrong with a probability of at most ERROR_RATE.

Rules of this file

    - Only held-out contexts judge. They had no part in choosing the plans or their order.
    - A context is one draw. Questions about one context share its KV, so they fail together. A
      context's quality is the mean over its questions, and all contexts weigh the same.
    - The order of the contexts and of the plans is fixed before the first answer.

How it works

    a plan at a task   We bet against the claim "the plan loses more than the tolerance". At each
                       context, lost = full - plan / (1 - tolerance), which is at most 1. If the
                       claim is true, the mean of lost is above 0. A bet b multiplies its stake by
                       1 - b * lost; several bets share a stake of 1. If the claim is true, no stake
                       grows on average. By Ville's inequality the stakes together then ever reach
                       1 / ERROR_RATE with a probability of at most ERROR_RATE. So the plan passes
                       as soon as they do (Waudby-Smith and Ramdas, 2024).
    a plan             It passes if it passes at every task. A plan that loses too much loses too
                       much at some task, and passes there with at most ERROR_RATE. So each
                       task gets the whole ERROR_RATE, however many tasks there are.
    a profile          It tries the plans in the training split's order, from most work to least,
                       and stops at the first that fails. A bad plan can only pass if the first bad
                       plan in this order passes. So each plan gets the whole ERROR_RATE, too.

Why not otherwise

    - A bootstrap assumes that the sample shows the scatter. A sample may lack a rare, large loss,
      and then the interval is too narrow. `interval` computes such intervals only for people to
      look at. The bets are right for any distribution within 0 and 1.
    - A test with a fixed number of contexts may look once. The bets may be looked at after every
      context, so a good plan stops early, and so does a hopeless one (`still_open`).
    - Hoeffding's inequality ignores that most contexts lose nothing, and needs more contexts.
    - A bet of 1 would be ruined for ever by one context on which all is lost.

What could be better

    - The bets are fixed. Bets that learn from earlier contexts could pass some plans earlier.
    - A context with many questions is more certain than a context with one; the gate ignores that.
    - A plan that fails by bad luck ends the trial, although a smaller plan behind it might pass.
    - The proof holds for traffic like the held-out contexts. The drift guard watches for the rest.

`benchmarks/gate_power.py` measures how often the gate passes wrongly, and how soon rightly.
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
"""Largest share of profiles that may pass wrongly."""
DRIFT_ERROR_RATE: Final = 0.01
"""Largest probability with which a bound of the drift guard may be wrong."""
CONTROL_SHARE: Final = 0.5
"""If a control without the document keeps more than this share of full prefill's quality, its task
cannot judge reuse."""
NUM_SAMPLES: Final = 10_000
_AT_ONCE: Final = 100
"""Bootstrap samples that are in memory at once. Each takes about 24 bytes per context."""
_SEED: Final = 0

_BETS: Final = np.array([0.95, 0.8, 0.5, 0.25])
"""Bets of the module's docstring, as shares of a stake. If a plan loses all quality on a context,
a bet loses this share of its stake. One such context would ruin a bet of 1."""
_STAKES: Final = np.array([0.4, 0.35, 0.15, 0.1])
"""Stake of each bet at the start. Together they are 1."""
_STEPS: Final = 1_000_000
"""Number of equal parts of [0, 1]: a bound is a multiple of 1 / `_STEPS`."""

MOST_CONTEXTS: Final = 300
"""Largest number of contexts of a task that judge, unless the user asks for more or fewer."""
MOST_CONTEXTS_NAMED: Final = 3_000
"""Largest number of contexts that a message asks for. Hardly any user has more."""


def interval(values: Qualities) -> Interval:
    """Return the mean quality over contexts, with its 95 % interval by a bootstrap of contexts. The
    interval is only shown; the gate does not read it."""
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
    """Return an upper bound on the share of full prefill's quality that the plan loses. It is wrong
    with a probability of at most `error_rate`. It is the smallest tolerance at which the plan
    passes, and 1 if full prefill has no quality to lose."""
    ours, theirs = _means(full), _means(plan)
    if not ours.any():
        return 1.0

    def has_won(step: int) -> bool:
        return bool((_wealth(ours, theirs, step / _STEPS) >= -log(error_rate)).any())

    return bisect_left(range(_STEPS), True, key=has_won) / _STEPS


def proven_after(full: Qualities, plan: Qualities, tolerance: float) -> int | None:
    """Return the number of contexts after which the plan passes. None if it does not pass."""
    has_won = _wealth(_means(full), _means(plan), tolerance) >= -log(ERROR_RATE)
    return int(has_won.argmax()) + 1 if has_won.any() else None


def still_open(
    full: Qualities,
    plans: Sequence[Qualities],
    tasks: Sequence[int],
    tolerance: float,
    most: int,
) -> list[int]:
    """Return the indices of the plans that should answer about the next context, in the order in
    which plans are tried. `plans` has each plan's qualities on the first contexts, about which it
    has answered. `tasks` has the task of every context.

    A plan is done as soon as it is proven at every task. It has failed if it could not be proven
    even without any further loss, with `most` contexts of each task. No plan behind a failed one is
    tried.
    """
    open_places: list[int] = []
    for place, plan in enumerate(plans):
        is_proven = True
        for task in {*tasks}:
            asked = [it for it in range(len(plan)) if tasks[it] == task]
            ours, theirs = [full[it] for it in asked], [plan[it] for it in asked]
            if proven_after(ours, theirs, tolerance) is not None:
                continue
            rest = [[1.0]] * (most - len(asked))
            if proven_after(ours + rest, theirs + rest, tolerance) is None:
                return open_places
            is_proven = False
        if not is_proven:
            open_places.append(place)
    return open_places


def mean_bound(values: Qualities, error_rate: float) -> float:
    """Return an upper bound on the mean of values in [0, 1]. It is wrong with a probability of at
    most `error_rate`."""
    complements = [[1.0 - it for it in context] for context in values]
    return loss_bound([[1.0] * len(it) for it in values], complements, error_rate)


def contexts_needed(full: Qualities, plan: Qualities, tolerance: float) -> int | None:
    """Return the number of contexts like these with which the plan would pass. None if no number is
    enough.

    A plan that is better than full prefill counts as a plan without loss: its gain was luck.
    """
    ours, theirs = _means(full), _means(plan)
    least, needed = (_num_passing(_gains(ours, it, tolerance).mean(1)) for it in (ours, theirs))
    return None if least is None or needed is None else max(least, needed)


def _num_passing(gains: NDArray[np.float64]) -> int | None:
    """Number of contexts after which a plan passes, if each multiplies stakes by exp(`gains`)."""
    if gains.max() <= 0:
        return None
    enough = ceil(-log(ERROR_RATE * _STAKES[gains.argmax()]) / gains.max())
    return bisect_left(range(enough), -log(ERROR_RATE), key=lambda it: _together(it * gains))


def _means(values: Qualities) -> NDArray[np.float64]:
    """Quality of each context: the mean over its questions."""
    return np.array([fmean(it) for it in values], dtype=np.float64)


def _gains(
    full: NDArray[np.float64], plan: NDArray[np.float64], tolerance: float
) -> NDArray[np.float64]:
    """Return log(1 - b * lost), `[bets, contexts]`: the logarithms of the factors by which each
    context multiplies the stake of each bet b.

    If the plan keeps less than 1 - tolerance of full prefill's quality, the mean of `lost` is above
    0. No context's `lost` is above 1.
    """
    lost = full - plan / (1 - tolerance)
    return np.log1p(np.outer(_BETS, -lost))


def _wealth(
    full: NDArray[np.float64], plan: NDArray[np.float64], tolerance: float
) -> NDArray[np.float64]:
    """Logarithm of the sum of all bets' stakes, after each context."""
    return _together(_gains(full, plan, tolerance).cumsum(1).T)


def _together(won: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of the sum of all bets' stakes. `won` has the logarithm of each bet's factor on its
    last axis."""
    return np.logaddexp.reduce(np.log(_STAKES) + won, axis=-1)


def is_within(losses: Sequence[TaskLoss], tolerance: float) -> bool:
    """True if every task proves the loss to be within the tolerance. A task at which full prefill
    answers nothing right proves nothing."""
    return bool(losses) and all(it.bound <= tolerance for it in losses)


def proven(plans: Iterable[FrontierPoint], tolerance: float) -> tuple[FrontierPoint, ...]:
    """Return the plans before the first plan that fails, in the order in which they are tried."""
    return tuple(takewhile(lambda it: is_within(it.tasks, tolerance), plans))


def verdict(plans: Sequence[FrontierPoint], split: Split, tolerance: float) -> tuple[bool, str]:
    """Decide whether the pair passes with these plans in their order, and say why in one
    sentence."""
    if (unjudged := nothing_to_lose(split)) is not None:
        return False, unjudged
    if not plans:
        return False, "no plan smaller than all layers was measured on all training questions"
    if passing := proven(plans, tolerance):
        return True, reason_of(passing[-1], split, tolerance)
    return False, f"no plan smaller than all layers passed: {reason_of(plans[0], split, tolerance)}"


def nothing_to_lose(split: Split) -> str | None:
    """Reason, in a sentence, why a split's tasks cannot judge a loss. None if they can."""
    for task in split.tasks:
        if task.full_prefill <= 0:
            return (
                "the receiver alone answers nothing right on held-out questions"
                f"{_of(task, split)}, so no loss can be judged; check data, template and metric"
            )
        for arm, share in _arms(task):
            if share > CONTROL_SHARE:
                return (
                    f"{arm} full prefill keeps {share:.0%} of its quality on held-out questions"
                    f"{_of(task, split)}, so this task cannot judge reuse; ask what only the "
                    "document answers"
                )
    return None


def controls_of(split: Split) -> str:
    """Say in a sentence what share of quality each task's controls keep."""
    said = (
        f"{' and '.join(f'{arm} {kept:.0%}' for arm, kept in arms)} of full prefill's quality is "
        f"left{_of(it, split)}{_repeated(it)}"
        for it in split.tasks
        if (arms := _arms(it))
    )
    return "; ".join(said)


def _repeated(task: TaskScores) -> str:
    """Say how often full prefill gives the same answers in two parts: only rounding differs."""
    if task.controls is None or (share := task.controls.in_two_parts) is None:
        return ""
    return f", and full prefill in two parts gives {share:.0%} of its own answers"


def _arms(task: TaskScores) -> list[tuple[str, float]]:
    """Share of full prefill's quality that each control keeps."""
    if task.controls is None or not task.controls.full_prefill:
        return []
    whole, controls = task.controls.full_prefill, task.controls
    return [
        ("without the document", controls.no_document / whole),
        ("with another document", controls.other_document / whole),
    ]


def _as_judged(task: TaskScores, lost: TaskLoss) -> TaskScores:
    """Scores of a task on the contexts that judged the plan."""
    if lost.num_contexts is None or lost.full_prefill is None:
        return task
    return replace(task, num_contexts=lost.num_contexts, full_prefill=lost.full_prefill)


def reason_of(plan: FrontierPoint, split: Split, tolerance: float) -> str:
    """Say in a sentence why a plan passes or does not."""
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
    """Return how many contexts a failed plan needs to pass, if they are like those of its least
    certain task. None if the plan loses too much at some task, or no number is enough."""
    for task, lost in zip(split.tasks, plan.tasks, strict=True):
        is_good = lost.quality >= (1 - tolerance) * _as_judged(task, lost).full_prefill
        if lost.bound > tolerance and (lost.needed is None or not is_good):
            return None
    return _worst(plan, split)[1].needed


def finding(plan: FrontierPoint, split: Split) -> str:
    """Say in a sentence what a plan loses at its least certain task."""
    task, lost = _worst(plan, split)
    corrected = "" if plan.e_map is None else " with corrected E"
    most = percent_at_most(lost.bound)
    return (
        f"the plan [{plan.start}, {plan.stop}){corrected} has {lost.quality:.3f} where full "
        f"prefill has {task.full_prefill:.3f} on held-out questions{_of(task, split)}, so that "
        f"with {1 - ERROR_RATE:.0%} confidence it loses {most:.1f}% of that at most"
    )


def percent_at_most(share: float) -> float:
    """Round a share up to a tenth of a percent. So a bound above the tolerance never looks like a
    bound within it."""
    return ceil(round(1000 * share, 6)) / 10


def _worst(plan: FrontierPoint, split: Split) -> tuple[TaskScores, TaskLoss]:
    """Return the task at which a plan's loss is least certain, with this loss. The task's scores
    are those of the contexts that judged the plan."""
    pairs = zip(split.tasks, plan.tasks, strict=True)
    task, lost = max(pairs, key=lambda it: it[1].bound)
    return _as_judged(task, lost), lost


def _of(task: TaskScores, split: Split) -> str:
    return f" of {task.name}" if len(split.tasks) > 1 else ""
