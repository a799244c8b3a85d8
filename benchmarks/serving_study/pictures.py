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
            if row["mean_wait_ms_in_theory"] is not None
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


DRAWN = {"s15": draw_poisson, "s16": draw_agents, "s21": draw_bursts}
