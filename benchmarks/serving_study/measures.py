"""Summary of a run: percentiles with intervals, goodput, and the mean wait that theory expects.

A measure has the name that `sglang.benchmark.serving` has for it, if any.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from .client import Answer

PERCENTILES = (50, 90, 99)
CONFIDENCE = 0.95


def trimmed(answers: Sequence[Answer], share: float = 0.1) -> list[Answer]:
    """Drop the first `share` of the answers: their requests found an empty queue."""
    return list(answers[int(share * len(answers)) :])


def summary(answers: Sequence[Answer], rate: float, target_s: float) -> dict[str, Any]:
    """Summarise a run. `rate` is the offered load in requests per second. `target_s` is the target
    for the TTFT."""
    span_s = max(it.tokens_s[-1] for it in answers) - min(it.due_s for it in answers)
    gaps = [b - a for it in answers for a, b in zip(it.tokens_s, it.tokens_s[1:], strict=False)]
    good = sum(it.ttft_s <= target_s for it in answers)
    return {
        "request_rate": rate,
        "completed": len(answers),
        "request_throughput": len(answers) / span_s,
        "request_goodput": good / span_s,
        "attainment": good / len(answers),
        "ttft_target_ms": 1000 * target_s,
        **percentiles("ttft_ms", [it.ttft_s for it in answers]),
        **percentiles("itl_ms", gaps),
        **percentiles("e2e_latency_ms", [it.latency_s for it in answers]),
        "p99_send_lag_ms": 1000 * float(np.percentile([it.lag_s for it in answers], 99)),
        "cached_tokens": sum(it.cached_tokens for it in answers),
        "reused_tokens": sum(it.reused_tokens for it in answers),
        "recomputed_layers": dict(Counter(str(it.recomputed_layers) for it in answers)),
        "outcomes": dict(Counter(it.outcome for it in answers)),
    }


def percentiles(name: str, values_s: Sequence[float]) -> dict[str, Any]:
    """Percentiles and their 95 % intervals, in ms, by name."""
    figures: dict[str, Any] = {}
    for percent in PERCENTILES:
        key = f"{'median' if percent == 50 else f'p{percent}'}_{name}"
        figures[key] = 1000 * float(np.percentile(values_s, percent))
        figures[f"{key}_interval"] = [1000 * it for it in _interval(values_s, percent)]
    return figures


def _interval(values_s: Sequence[float], percent: float) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns if all values are equal.
        interval = bootstrap(
            (np.asarray(values_s),),
            lambda sample, axis: np.percentile(sample, percent, axis=axis),
            n_resamples=500,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=0,
        ).confidence_interval
    return float(interval.low), float(interval.high)


def mean_wait_s(per_s: float, services_s: Sequence[float]) -> float | None:
    """Mean wait in a queue with Poisson arrivals and one server: λ E[S²] / 2 (1 - ρ) (M/G/1,
    Pollaczek and Khinchine). None if the queue grows without end."""
    services = np.asarray(services_s)
    load = per_s * services.mean()
    if load >= 1:
        return None
    return float(per_s * (services**2).mean() / (2 * (1 - load)))
