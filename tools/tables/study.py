"""Of `benchmarks/serving_study`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tools.tables.cells import Row, counted, named, of_rows, told

TTFTS: Final = {
    "TTFT, median, s": "{median_ttft_ms!k:.2f}",
    "p90": "{p90_ttft_ms!k:.2f}",
    "p99": "{p99_ttft_ms!k:.2f}",
}
_NINE_OF_TEN: Final = 0.9
_WHO: Final = {"contender": "{contender}", "load": "{load:.1f}"}


def in_time(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Of a contender: what the highest rate gave up to which nine of ten requests kept the target
    at each rate that was run, and what the next one did. Empty where there is none."""
    kept: Row = {}
    for row in sorted(rows, key=lambda row: row["request_rate"]):
        if row["attainment"] < _NINE_OF_TEN:
            return kept, row
        kept = row
    return kept, {}


def served(found: Any) -> str:
    """The rates that were run between which the target is lost, beside what theory allows."""
    rows = []
    for name, of in found["rows"].items():
        kept, lost = in_time(of)
        idle = {key: found[key][name] for key in ("idle_ttft_ms", "idle_latency_ms", "bound")}
        rows.append({"contender": name, "kept": kept, "lost": lost, **idle})
    columns = {
        "contender": "{contender}",
        "TTFT of an idle server, s": "{idle_ttft_ms!k:.2f}",
        "whole request, s": "{idle_latency_ms!k:.2f}",
        "in time at, requests/s": "{kept[request_rate]:.2f} ({kept[attainment]:.0%})",
        "no more at": "{lost[request_rate]:.2f} ({lost[attainment]:.0%})",
        "bound": "{bound:.2f} ×",
    }
    return of_rows(rows, columns) + told(
        "\n{size[num_replicas]} replicas of {size[layers]} layers × {size[hidden]}, documents of "
        "{size[document_tokens]} tokens, one run of {size[num_requests]} requests of each "
        "contender at each rate, without the first tenth; in time is nine of ten within "
        "{ttft_target_ms!k:.2f} s.\n",
        found,
    )


def under_load(found: Any) -> str:
    """Each contender at each rate."""
    columns = {
        **_WHO,
        "requests/s": "{request_rate:.2f}",
        "TTFT, mean, s": "{mean_ttft_ms!k:.2f}",
        **dict(zip(("median", "p90", "p99"), TTFTS.values(), strict=True)),
        "mean in theory": "{in_theory_ms!k:.2f}",
        "TBT, ms, p50 / p99": "{median_itl_ms:.0f} / {p99_itl_ms:.0f}",
        "in time": "{attainment:.0%}",
        "same answers": "{same_answers:.0%}",
    }
    rows = list(named(found["rows"]))
    for row in rows:
        wait_ms, idle_ms = row["mean_wait_ms_in_theory"], found["idle_ttft_ms"][row["contender"]]
        row["in_theory_ms"] = None if wait_ms is None else wait_ms + idle_ms
    return of_rows(rows, columns)


def bursts(found: Any) -> str:
    """Requests beyond the target, where the rate doubles and where requests come in bursts."""
    columns = {
        "stream": "{stream}",
        **_WHO,
        "beyond the target": "{beyond:.0%}",
        **TTFTS,
        "same answers": "{same_answers:.0%}",
    }
    kinds = {"step": "the rate doubles", "gamma": "bursts"}
    rows = (
        {"stream": kinds[kind], "beyond": 1 - row["attainment"], **row}
        for kind, arms in found["rows"].items()
        for row in named(arms)
    )
    return of_rows(rows, columns)


def stream(found: Any) -> str:
    """Of requests, some of which may come before their document is on offer."""
    columns = {
        **_WHO,
        **TTFTS,
        "in time": "{attainment:.0%}",
        "not found": "{late} of {completed}",
        "median of the others, s": "{median_found_ttft_ms!k:.2f}",
    }
    return of_rows(named(found["rows"]), columns)


def agents(found: Any) -> str:
    columns = {
        "contender": "{contender}",
        "problems/s": "{problem_rate:.2f}",
        **TTFTS,
        "a problem, median, s": "{median_problem_ms!k:.2f}",
        "p90 ": "{p90_problem_ms!k:.2f}",
        "tokens from the other agent": "{from_other:.0%}",
        "from any cache": "{from_any:.0%}",
    }
    rows = (
        {
            **row,
            "from_other": row["reused_tokens"] / row["prompt_tokens"],
            "from_any": row["cached_tokens"] / row["prompt_tokens"],
        }
        for row in named(found["rows"])
    )
    return of_rows(rows, columns)


def two_receivers(found: Any) -> str:
    columns = {
        "strategy": "{strategy}",
        "the paper's units": "{in_the_paper:.0f}",
        "TTFT of both, s": "{median_total_ttft_ms!k:.2f}",
        "predicted": "{predicted_ms!k:.2f}",
        "sooner than the first": "{measured:.2f} ×",
        "predicted ": "{expected:.2f} ×",
        "off by": "{off:+.0%}",
    }
    first, rows = found["rows"][0], []
    for row in found["rows"]:
        measured, expected = (
            first[key] / row[key] for key in ("median_total_ttft_ms", "predicted_ms")
        )
        gains = {"measured": measured, "expected": expected, "off": measured / expected - 1}
        rows.append({**row, **gains, "strategy": row["strategy"].replace("_", " ")})
    return of_rows(rows, columns)


def short_documents(found: Any) -> str:
    """Of each way the TTFT, and how much it is of a full prefill's."""
    arm = "{{{0}[median_ttft_ms]!k:.2f}} ({{{0}[ratio]:.3f}})"
    columns = {
        "tokens of a document": "{tokens}",
        "full prefill, s": "{full prefill[median_ttft_ms]!k:.2f}",
        "block (of it)": arm.format("block"),
        "planner (of it)": arm.format("planner"),
        "outcomes of the planner": "{said}",
    }
    rows = (
        {**row, **row["arms"], "said": counted(row["arms"]["planner"]["outcomes"])}
        for row in found["rows"]
    )
    return of_rows(rows, columns)


def quality_and_delay(found: Any) -> str:
    columns = {
        "pair": "{pair}",
        "way": "{way}",
        "TTFT, median, s": "{median_ttft_ms!k:.2f}",
        "F1": "{quality:.3f}",
        "95 %": "{quality_interval[0]:.2f} to {quality_interval[1]:.2f}",
    }
    rows = (
        {"pair": pair, "way": way, **row}
        for pair, ways in found["rows"].items()
        for way, row in ways.items()
    )
    return of_rows(rows, columns)


def gain(found: Any) -> str:
    """The README's sentence: of each the highest rate in time, or the lowest that was run."""
    kept = {name: in_time(found["rows"][name]) for name in ("SGLang alone", "block")}
    alone, block = (kept[name][0] or kept[name][1] for name in ("SGLang alone", "block"))
    return told(
        "Under load, with random weights of {size[layers]} layers × {size[hidden]}, "
        "{size[num_replicas]} replicas and documents of {size[document_tokens]} tokens: a "
        "receiver that recomputes a block had the first token within {ttft_target_ms!k:.2f} s in "
        "{block[attainment]:.0%} of {block[completed]} requests at {block[request_rate]:.2f} a "
        "second; SGLang alone in {alone[attainment]:.0%} at {alone[request_rate]:.2f} a second. "
        "That is **{gain:.1f} ×** the rate: of those that were run, once each, the highest at "
        "which nine of ten were in time, or the lowest of all. A sender has read the documents "
        "before, which is not counted, and no replica has one in its own cache.\n",
        {
            **found,
            "block": block,
            "alone": alone,
            "gain": block["request_rate"] / alone["request_rate"],
        },
    )


PARTS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    name: (f"serving_study/{study}", part)
    for name, study, part in (
        ("serving_gain", "s15", gain),
        ("served", "s15", served),
        ("under_load", "s15", under_load),
        ("bursts", "s21", bursts),
        ("with_senders", "s15b", stream),
        ("trace", "trace", stream),
        ("agents", "s16", agents),
        ("two_receivers", "s13", two_receivers),
        ("short_documents", "short", short_documents),
        ("quality", "s14", quality_and_delay),
    )
}
