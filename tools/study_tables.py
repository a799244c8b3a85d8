"""What `benchmarks/serving_study` found, as tables: a head and rows each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).resolve().parent.parent / "benchmarks/results/serving_study"

Table = tuple[list[str], list[list[str]]]


def under_load() -> Table:
    """Each contender at each rate."""
    found = _read("s15")
    rows = []
    for name, of in found["rows"].items():
        for row in of:
            wait_ms = row["mean_wait_ms_in_theory"]
            expected = "–" if wait_ms is None else _seconds(wait_ms + found["idle_ttft_ms"][name])
            rows.append(
                [
                    name,
                    f"{row['load']:.1f}",
                    f"{row['request_rate']:.2f}",
                    *(_seconds(row[f"{it}_ttft_ms"]) for it in ("mean", "median", "p90", "p99")),
                    expected,
                    f"{row['median_itl_ms']:.0f} / {row['p99_itl_ms']:.0f}",
                    f"{row['attainment']:.0%}",
                    f"{row['same_answers']:.0%}",
                ]
            )
    head = ["contender", "load", "requests/s", "TTFT, mean, s", "median", "p90", "p99"]
    return [*head, "mean in theory", "TBT, ms, p50 / p99", "in time", "same answers"], rows


def served() -> Table:
    """The rate at which nine of ten requests keep the target, beside what theory allows."""
    found = _read("s15")
    alone = found["served_per_s"]["SGLang alone"]
    rows = [
        [
            name,
            _seconds(found["idle_ttft_ms"][name]),
            _seconds(found["idle_latency_ms"][name]),
            f"{rate:.2f}",
            f"{rate / alone:.2f} ×" if alone else "–",
            f"{found['bound'][name]:.2f} ×",
        ]
        for name, rate in found["served_per_s"].items()
    ]
    head = ["contender", "TTFT of an idle server, s", "whole request, s"]
    return [*head, "requests/s in time", "of SGLang alone", "bound"], rows


def bursts() -> Table:
    """Requests beyond the target, where the rate doubles and where requests come in bursts."""
    kinds = {"step": "the rate doubles", "gamma": "bursts"}
    rows = [
        [
            kinds[kind],
            name,
            f"{row['load']:.1f}",
            f"{1 - row['attainment']:.0%}",
            *_ttfts(row),
            f"{row['same_answers']:.0%}",
        ]
        for kind, arms in _read("s21")["rows"].items()
        for name, of in arms.items()
        for row in of
    ]
    head = ["stream", "contender", "load", "beyond the target", "TTFT, median, s", "p90", "p99"]
    return [*head, "same answers"], rows


def agents() -> Table:
    found = _read("s16")
    rows = [
        [
            name,
            f"{row['problem_rate']:.2f}",
            *_ttfts(row),
            *(_seconds(row[f"{it}_problem_ms"]) for it in ("median", "p90")),
            f"{row['reused_tokens'] / row['prompt_tokens']:.0%}",
            f"{row['cached_tokens'] / row['prompt_tokens']:.0%}",
        ]
        for name, of in found["rows"].items()
        for row in of
    ]
    head = ["contender", "problems/s", "TTFT of a turn, median, s", "p90", "p99"]
    head += ["a problem, median, s", "p90", "tokens from the other agent"]
    return [*head, "from any cache"], rows


def with_senders() -> Table:
    """S15b beside S15 at the same load."""
    beside = _read("s15")["rows"]
    return _stream(_read("s15b"), beside)


def trace() -> Table:
    return _stream(_read("trace"), {})


def _stream(found: Any, beside: Any) -> Table:
    rows = []
    for name, of in found["rows"].items():
        for row in of:
            same = [it for it in beside.get(name, ()) if it["load"] == row["load"]]
            asked = [_seconds(it["median_ttft_ms"]) for it in same]
            rest = row.get("median_found_ttft_ms")
            rows.append(
                [
                    name,
                    f"{row['load']:.1f}",
                    *_ttfts(row),
                    f"{row['attainment']:.0%}",
                    f"{row['late']} of {row['completed']}",
                    "–" if rest is None else _seconds(rest),
                    *(asked if beside else ()),
                ]
            )
    head = ["contender", "load", "TTFT, median, s", "p90", "p99", "in time", "not found"]
    head.append("median of the others, s")
    return [*head, "median without senders in the stream, s"] if beside else head, rows


def two_receivers() -> Table:
    rows = _read("s13")["rows"]
    first = rows[0]
    told = []
    for row in rows:
        measured, predicted = (
            first[key] / row[key] for key in ("median_total_ttft_ms", "predicted_ms")
        )
        told.append(
            [
                row["strategy"].replace("_", " "),
                f"{row['in_the_paper']:.0f}",
                _seconds(row["median_total_ttft_ms"]),
                _seconds(row["predicted_ms"]),
                f"{measured:.2f} ×",
                f"{predicted:.2f} ×",
                f"{measured / predicted - 1:+.0%}",
            ]
        )
    head = ["strategy", "the paper's units", "TTFT of both, s", "predicted"]
    return [*head, "sooner than the first", "predicted", "off by"], told


def routes() -> Table:
    """Of a router that went: `benchmarks/README.md` has why."""
    found = _read("routes")
    rows = []
    for arm, row in found["rows"].items():
        low, high = (_seconds(it) for it in row["p90_ttft_ms_interval"])
        rows.append(
            [
                arm,
                f"{row['request_rate']:.2f}",
                *(_seconds(row[f"{it}_ttft_ms"]) for it in ("median", "p90", "p99")),
                f"{low} to {high}",
                f"{row['near']:.0%}",
            ]
        )
    head = ["who chooses", "requests/s", "TTFT, median, s", "p90", "p99", "p90, 95 %"]
    return [*head, "on the sender's host"], rows


def workflows() -> Table:
    """Of hints that went: `benchmarks/README.md` has why."""
    rows = []
    for name, row in _read("workflows")["rows"].items():
        low, high = (_seconds(it) for it in row["p90_ttft_ms_interval"])
        found = f"{row['cached_tokens'] / row['prompt_tokens']:.0%}"
        rows.append([name, *_ttfts(row), f"{low} to {high}", found])
    head = ["contender", "TTFT of a turn, median, s", "p90", "p99", "p90, 95 %"]
    return [*head, "tokens from any cache"], rows


def link_speeds() -> Table:
    return _arms("s20", "mb_per_s", "link, MB/s")


def short_documents() -> Table:
    return _arms("short", "tokens", "tokens of a document")


def _arms(study: str, key: str, label: str) -> Table:
    found = _read(study)["rows"]
    names = list(found[0]["arms"])
    rows = []
    for row in found:
        arms = row["arms"]
        cells = [
            f"{_seconds(arms[name]['median_ttft_ms'])} ({arms[name]['ratio']:.3f})"
            if name in arms
            else "–"
            for name in names[1:]
        ]
        outcomes = arms["planner"]["outcomes"].items()
        said = ", ".join(f"{num} `{outcome}`" for outcome, num in outcomes)
        full = _seconds(arms[names[0]]["median_ttft_ms"])
        rows.append([f"{row[key]:,.0f}" if row[key] else "none", full, *cells, said])
    head = [label, f"{names[0]}, s", *(f"{name} (of it)" for name in names[1:])]
    return [*head, "outcomes of the planner"], rows


def quality() -> Table:
    rows = [
        [
            pair,
            way,
            _seconds(row["median_ttft_ms"]),
            f"{row['quality']:.3f}",
            "[{:.2f}, {:.2f}]".format(*row["quality_interval"])
            if "quality_interval" in row
            else "–",
            "served" if row["served"] else "computed",
        ]
        for pair, ways in _read("s14")["rows"].items()
        for way, row in ways.items()
    ]
    return ["pair", "way", "TTFT, median, s", "F1", "95 %", "time"], rows


def witnesses() -> Table:
    """One replica at one rate, by several clients."""
    rows = [
        [
            it["arm"],
            it["client"],
            *(
                _seconds(it[f"{key}_ms"])
                for key in ("median_ttft", "p99_ttft", "median_e2e_latency")
            ),
            f"{it['request_throughput']:.2f}",
        ]
        for it in _read("witness")["rows"]
    ]
    head = ["contender", "client", "TTFT, median, s", "p99", "whole request, median, s"]
    return [*head, "requests/s"], rows


def gain() -> str:
    """The README's sentence."""
    found = _read("s15")
    served, size = found["served_per_s"], found["size"]
    alone, block = served["SGLang alone"], served["block"]
    target_s = _seconds(found["ttft_target_ms"])
    return (
        f"Under load, with random weights of {size['layers']} layers × {size['hidden']}, "
        f"{size['num_replicas']} replicas and documents of {size['document_tokens']} tokens, a "
        f"receiver that recomputes a block serves {block:.2f} requests a second within {target_s} "
        f"s to the first token, where SGLang alone serves {alone:.2f}: **{block / alone:.1f} ×**. "
    )


def _ttfts(row: Any) -> list[str]:
    return [_seconds(row[f"{it}_ttft_ms"]) for it in ("median", "p90", "p99")]


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.2f}"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())
