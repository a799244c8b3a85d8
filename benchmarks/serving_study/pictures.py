"""Pictures of what is kept of the studies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_poisson(found: Mapping[str, Any], path: Path) -> None:
    """TTFT against the rate of requests, medians and 90th percentiles, one colour a contender;
    thin lines are the mean that theory has."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    ttft, attained = figure.subplots(1, 2)
    for index, (name, rows) in enumerate(found["rows"].items()):
        colour = f"C{index}"
        rates = [row["request_rate"] for row in rows]
        for percentile, style in (("median", "-"), ("p90", "--")):
            label = name if percentile == "median" else None
            seconds = [row[f"{percentile}_ttft_ms"] / 1000 for row in rows]
            ttft.plot(rates, seconds, style, marker="o", color=colour, label=label)
        expected = [
            (
                row["request_rate"],
                (row["mean_wait_ms_in_theory"] + found["idle_ttft_ms"][name]) / 1000,
            )
            for row in rows
            if row.get("mean_wait_ms_in_theory") is not None
        ]
        if expected:
            ttft.plot(*zip(*expected, strict=True), ":", color=colour)
        attained.plot(rates, [100 * row["attainment"] for row in rows], marker="o", color=colour)
    ttft.axhline(found["ttft_target_ms"] / 1000, color="#999999", linewidth=0.8)
    ttft.set(yscale="log", xlabel="requests per second", ylabel="TTFT, seconds")
    ttft.set_title("median, p90 (dashed), mean in theory (dotted)", fontsize=10)
    ttft.legend()
    attained.set(xlabel="requests per second", ylabel="within the TTFT target, %")
    figure.savefig(path, dpi=130)


def draw_bursts(found: Mapping[str, Any], path: Path) -> None:
    """Share of requests beyond the TTFT target, against the load before the step or on average."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (kind, arms) in zip(figure.subplots(1, 2), found["rows"].items(), strict=True):
        for name, rows in arms.items():
            late = [100 * (1 - row["attainment"]) for row in rows]
            axes.plot([row["load"] for row in rows], late, marker="o", label=name)
        axes.set(xlabel="load, of full prefill's capacity", ylabel="beyond the TTFT target, %")
        axes.set_title({"step": "the rate doubles", "gamma": "bursts"}[kind], fontsize=10)
        axes.legend()
    figure.savefig(path, dpi=130)


def draw_agents(found: Mapping[str, Any], path: Path) -> None:
    """TTFT of all turns but the first, and a problem's whole time, against problems per second."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    names = {"ttft_ms": "TTFT of a turn, seconds", "problem_ms": "a problem, seconds"}
    for axes, (key, label) in zip(figure.subplots(1, 2), names.items(), strict=True):
        for index, (name, rows) in enumerate(found["rows"].items()):
            rates = [row["problem_rate"] for row in rows]
            for percentile, style in (("median", "-"), ("p90", "--")):
                seconds = [row[f"{percentile}_{key}"] / 1000 for row in rows]
                said = name if percentile == "median" else None
                axes.plot(rates, seconds, style, marker="o", color=f"C{index}", label=said)
        axes.set(xlabel="problems per second", ylabel=label)
        axes.legend()
    figure.savefig(path, dpi=130)


def draw_strategies(found: Mapping[str, Any], path: Path) -> None:
    """What two receivers take together, beside what is predicted."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = found["rows"]
    places = range(len(rows))
    for shift, key, label in (
        (-0.2, "median_total_ttft_ms", "measured"),
        (0.2, "predicted_ms", "predicted"),
    ):
        at = [place + shift for place in places]
        axes.bar(at, [row[key] / 1000 for row in rows], width=0.4, label=label)
    axes.set_xticks(places, [row["strategy"].replace("_", " ") for row in rows])
    axes.set(ylabel="TTFT of both, seconds")
    axes.legend()
    figure.savefig(path, dpi=130)


def draw_links(found: Mapping[str, Any], path: Path) -> None:
    """TTFT by the link's rate; what has no link stands at the left."""
    _draw_arms(found, path, "mb_per_s", "link, MB/s; leftmost: none")


def draw_lengths(found: Mapping[str, Any], path: Path) -> None:
    _draw_arms(found, path, "tokens", "tokens of the document")


def _draw_arms(found: Mapping[str, Any], path: Path, key: str, label: str) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    least = min(row[key] for row in found["rows"] if row[key])
    for name in found["rows"][0]["arms"]:
        rows = [row for row in found["rows"] if name in row["arms"]]
        places = [row[key] or least / 2 for row in rows]
        seconds = [row["arms"][name]["median_ttft_ms"] / 1000 for row in rows]
        order = sorted(zip(places, seconds, strict=True))
        axes.plot(*zip(*order, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel=label, ylabel="TTFT, seconds")
    axes.legend()
    figure.savefig(path, dpi=130)


def draw_quality(found: Mapping[str, Any], path: Path) -> None:
    """Quality against delay; hollow where the delay is computed."""
    pairs = found["rows"]
    figure = Figure(figsize=(6.5 * len(pairs), 5), layout="constrained")
    for axes, (pair, rows) in zip(
        figure.subplots(1, len(pairs), squeeze=False)[0], pairs.items(), strict=True
    ):
        for index, kind in enumerate(dict.fromkeys(_kind(name) for name in rows)):
            of = [row for name, row in rows.items() if _kind(name) == kind]
            axes.scatter(
                [row["median_ttft_ms"] / 1000 for row in of],
                [row["quality"] for row in of],
                edgecolors=f"C{index}",
                facecolors=[f"C{index}" if row["served"] else "none" for row in of],
                label=kind,
            )
        axes.set(xlabel="TTFT, seconds", ylabel="quality", title=pair)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _kind(way: str) -> str:
    """Without the layers; a corrected block is a kind of its own."""
    name = way.partition(" [")[0].partition(", ")[0]
    return f"{name}, E corrected" if way.endswith("corrected") else name


DRAWN = {
    "s13": draw_strategies,
    "s14": draw_quality,
    "s15": draw_poisson,
    "s15b": draw_poisson,
    "s16": draw_agents,
    "s20": draw_links,
    "s21": draw_bursts,
    "short": draw_lengths,
    "trace": draw_poisson,
}
