"""Numbers and names as text for people, the same in terminals, pictures and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachetree import Span
from profiles.evidence import Baseline, BaselineKind, FrontierPoint, Interval
from profiles.stats.gate import percent_at_most

ABSENT: Final = "–"

BASELINES: Final = {
    BaselineKind.CACHEBLEND: "CacheBlend",
    BaselineKind.TOKEN_SELECTION: "token selection",
    BaselineKind.CRITICAL_LAYERS: "critical layers alone",
    BaselineKind.SPLIT_BLOCK: "block in several runs",
    BaselineKind.SMALL_MODEL: "smaller model",
}

_MAX_RUNS: Final = 4

_METRICS: Final = {
    "f1": "token F1",
    "rouge_l": "Rouge-L",
    "edit_similarity": "edit similarity",
    "json_values": "right JSON values",
    "same": "answers as full prefill",
}


def baseline(way: Baseline) -> str:
    """Name a baseline so that it differs from others of its kind and size."""
    if way.kind is not BaselineKind.SPLIT_BLOCK:
        return BASELINES[way.kind]
    return f"[{way.runs[0][0]}, {way.runs[-1][1]}) in {len(way.runs)} runs"


def metric_name(metric: str) -> str:
    """
    >>> metric_name("f1"), metric_name("exact_number+rouge_l")
    ('token F1', 'exact number and Rouge-L')
    """
    parts = metric.split("+")
    return " and ".join(_METRICS.get(part, part.replace("_", " ")) for part in parts)


def quality(value: float) -> str:
    """
    >>> quality(0.98612)
    '0.986'
    """
    return f"{value:.3f}"


def quality_interval(interval: Interval) -> str:
    return f"{quality(interval.mean)} [{quality(interval.low)}, {quality(interval.high)}]"


def points(difference: float) -> str:
    """Write a difference of qualities in points, which are hundredths.

    >>> points(0.0424), points(-0.00001)
    ('4.2', '0.0')
    """
    return f"{round(100 * difference, 1) + 0.0:.1f}"


def percent(share: float) -> str:
    """
    >>> percent(0.254), percent(0.0041)
    ('25 %', '0.4 %')
    """
    return f"{100 * share:.0f} %" if share == 0 or abs(share) >= 0.01 else f"{100 * share:.1g} %"


def stated_percent(share: float) -> str:
    """Write a share as exactly as the user stated it.

    >>> stated_percent(0.05), stated_percent(0.025)
    ('5 %', '2.5 %')
    """
    return f"{100 * share:.3g} %"


def bound(plan: FrontierPoint) -> str:
    """Say the largest share of quality that a plan may lose, at its least certain task."""
    return percent_kept(max(it.bound for it in plan.tasks)) if plan.tasks else ABSENT


def percent_kept(share: float) -> str:
    """Write a share in percent, rounded up to a tenth.

    >>> percent_kept(0.9487), percent_kept(0.0504)
    ('94.9 %', '5.1 %')
    """
    return f"{percent_at_most(share):.1f} %"


def seconds(time_s: float) -> str:
    """Write a time with three digits and a fitting unit.

    >>> seconds(0.000042), seconds(0.0412), seconds(4.2), seconds(754), seconds(3e-13)
    ('42.0 µs', '41.2 ms', '4.20 s', '754 s', '0.0003 ns')
    """
    scale, unit = unit_of_time(time_s)
    value = time_s * scale
    if abs(value) < 1:
        return f"{value:.3g} {unit}" if value else "0 s"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def unit_of_time(time_s: float) -> tuple[float, str]:
    """Return the unit in which a time is between 1 and 1000: the number of units in a second, and
    the unit's name."""
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))
    return next((it for it in units if abs(time_s) * it[0] >= 1), units[-1])


def duration(time_s: float) -> str:
    """Say for people how long something took.

    >>> duration(42.4), duration(754), duration(7300)
    ('42 s', '12 min 34 s', '2 h 1 min')
    """
    whole = round(time_s)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def small(value: float) -> str:
    """Write a number that may be very small with two digits.

    >>> small(0.0), small(2.0), small(0.00314), small(0.0000042)
    ('0', '2.0', '0.0031', '4.2e-06')
    """
    return "0" if value == 0 else f"{value:#.2g}".rstrip(".")


def plan(point: FrontierPoint) -> str:
    return span(point.block) + ("" if point.e_map is None else ", E corrected")


def span(block: Span) -> str:
    return f"[{block.start}, {block.stop})"


def runs(blocks: Sequence[tuple[int, int]]) -> str:
    """Write runs of layers, or how many there are.

    >>> runs([(2, 3), (4, 6)]), runs([(i, i + 1) for i in range(9)]), runs([])
    ('[2, 3), [4, 6)', '9 runs in [0, 9)', '–')
    """
    if len(blocks) > _MAX_RUNS:
        return f"{len(blocks)} runs in [{blocks[0][0]}, {blocks[-1][1]})"
    return ", ".join(span(Span(start, stop)) for start, stop in blocks) or ABSENT


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "layer"), counted(1200, "block")
    ('1 layer', '1,200 blocks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
