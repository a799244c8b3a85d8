"""How often does the gate pass a plan that loses too much? How early does it pass a good plan?

    python -m benchmarks.gate_power [--runs 4000] [--json benchmarks/results/gate_power.json]

We simulate held-out contexts and know their true loss. The profiler's own gate
(`profiles.stats.gate`) reads them one after another, at its tolerance of 5 %.

    even        each question is drawn independently: a plan loses right answers and gains a few
    clustered   a third of the loss is in lost contexts, where the plan has no right answer
    whole       all of the loss is in lost contexts
    rare large  all of the loss is in a few lost contexts, which have forty questions
    uneven      as `even`, with one to forty questions for each context

Baseline: the previous gate. It bet 1, 1/2, 1/4, … 1/32, and judged only once, after all contexts.

Physics: the gate bets against "the plan loses more than the tolerance". If the plan does lose more,
the bet wins by luck at most one time in twenty (Ville's inequality). This holds for any contexts,
however often the gate judges. So the benchmark fails if the rate of false passes is above 5 % and
two standard deviations. The bets are chosen to prove good plans early. If a loss is just below the
tolerance, the gate needs many contexts: the inverse square of the distance from the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import result
from profiles.stats.gate import ERROR_RATE, proven_after

TOLERANCE: Final = 0.05
FULL: Final = 0.91
"""Share of full prefill's answers that are right."""
GAINED: Final = 0.02
"""Share of full prefill's wrong answers that a plan has right."""
SIZES: Final = ((120, 2), (120, 6), (300, 2), (300, 6))
"""Sizes of a data set: number of contexts, and number of questions about each."""
LOSSES: Final = (0.01, 0.023)
MANY: Final = 40
LARGE: Final = 0.055
"""Share of contexts that have `MANY` questions, in the world `rare large`."""

Sample = tuple[list[list[float]], list[list[float]]]
"""Qualities of full prefill and of a plan, for each context and question."""
World = Callable[[np.random.Generator, NDArray[np.int64], float], Sample]


def even(rng: np.random.Generator, counts: NDArray[np.int64], loss: float) -> Sample:
    return _drawn(rng, counts, loss, np.zeros(len(counts), bool))


def clustered(rng: np.random.Generator, counts: NDArray[np.int64], loss: float) -> Sample:
    is_lost = rng.random(len(counts)) < loss / 3
    return _drawn(rng, counts, 2 * loss / 3 / (1 - loss / 3), is_lost)


def whole(rng: np.random.Generator, counts: NDArray[np.int64], loss: float) -> Sample:
    return _drawn(rng, counts, None, rng.random(len(counts)) < loss)


def rare_large(rng: np.random.Generator, counts: NDArray[np.int64], loss: float) -> Sample:
    is_large = rng.random(len(counts)) < LARGE
    is_lost = is_large & (rng.random(len(counts)) < loss / LARGE)
    return _drawn(rng, np.where(is_large, MANY, counts), None, is_lost)


def uneven(rng: np.random.Generator, counts: NDArray[np.int64], loss: float) -> Sample:
    return even(rng, rng.integers(1, MANY + 1, len(counts)), loss)


WORLDS: Final[dict[str, World]] = {
    "even": even,
    "clustered": clustered,
    "whole": whole,
    "rare large": rare_large,
    "uneven": uneven,
}


def _drawn(
    rng: np.random.Generator,
    counts: NDArray[np.int64],
    loss: float | None,
    is_lost: NDArray[np.bool_],
) -> Sample:
    """Draw right and wrong answers. The plan has none right in the contexts of `is_lost`. Elsewhere
    it loses a share `loss` of full prefill's quality, question by question (None: nothing)."""
    full, plan = [], []
    for count, lost in zip(counts, is_lost, strict=True):
        right = rng.random(count) < FULL
        gained = 0.0 if loss is None else GAINED
        dropped = 0.0 if loss is None else loss + gained * (1 - FULL) / FULL
        rolled = rng.random(count)
        plan_right = np.where(right, rolled >= dropped, rolled < gained) & (not lost)
        full.append(right.astype(float).tolist())
        plan.append(plan_right.astype(float).tolist())
    return full, plan


def passed_before(full: list[list[float]], plan: list[list[float]]) -> bool:
    """Return whether the previous gate passes the plan."""
    bets = 0.5 ** np.arange(6)
    lost = np.array([fmean(it) for it in full]) - np.array([fmean(it) for it in plan]) / (
        1 - TOLERANCE
    )
    with np.errstate(divide="ignore"):
        won = np.log1p(np.outer(bets, -lost)).sum(1)
    return bool(np.logaddexp.reduce(np.log(bets / 2) + won) >= -log(ERROR_RATE))


def rate(world: str, size: tuple[int, int], loss: float, runs: int) -> dict[str, Any]:
    """Return the share of runs that pass, and the median number of contexts that a passing run
    takes."""
    rng, taken, before = np.random.default_rng(7), [], 0
    for _ in range(runs):
        sample = WORLDS[world](rng, np.full(size[0], size[1]), loss)
        taken.append(proven_after(*sample, TOLERANCE))
        before += passed_before(*sample)
    passed = [it for it in taken if it is not None]
    share = len(passed) / runs
    return {
        "world": world,
        "contexts": size[0],
        "questions": size[1],
        "loss": loss,
        "passed": round(share, 4),
        "deviation": round(sqrt(share * (1 - share) / runs), 4),
        "contexts_taken": median(passed) if passed else None,
        "passed_before": round(before / runs, 4),
    }


def most_false(runs: int) -> float:
    """Return the highest rate of false passes that the benchmark accepts: two standard deviations
    above `ERROR_RATE`."""
    return ERROR_RATE + 2 * sqrt(ERROR_RATE * (1 - ERROR_RATE) / runs)


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    args = parser.parse_args()
    environment = result.here()
    false = [rate(world, (300, 6), TOLERANCE, args.runs) for world in WORLDS]
    power = [
        rate(world, size, loss, args.runs // 4)
        for world in WORLDS
        for size in SIZES
        for loss in LOSSES
    ]
    results = {"runs": args.runs, "false_passes": false, "power": power}
    result.write("gate_power", results, environment, args.json)
    if wrong := [it for it in false if it["passed"] > most_false(args.runs)]:
        raise SystemExit(f"passes too often: {wrong}")


if __name__ == "__main__":
    main()
