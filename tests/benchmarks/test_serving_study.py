"""The serving study: its arithmetic, and all of it once on tiny servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_parts import ENV
from forked import ServerSpec

from benchmarks.serving_study import rig
from benchmarks.serving_study.__main__ import main
from benchmarks.serving_study.arrivals import at_rate, gamma, poisson, shuffled_rounds, stepped
from benchmarks.serving_study.client import Answer
from benchmarks.serving_study.measures import mean_wait_s, summary, trimmed
from benchmarks.serving_study.streams import prompt_of, read_trace
from tools.tables import in_time, shown

ROOT = Path(__file__).parents[2]


def answer(due_s: float, ttft_s: float, *gaps_s: float, **more: object) -> Answer:
    tokens_s = np.cumsum([due_s + ttft_s, *gaps_s]).tolist()
    label = {
        "document": 0,
        "replica": "",
        "output_ids": [1],
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "outcome": "none",
    }
    return Answer(due_s=due_s, sent_s=due_s, tokens_s=tokens_s, **{**label, **more})


def test_gaps_have_the_mean_and_the_spread_that_they_should():
    for cv in (1.0, 2.0):
        gaps = np.diff(gamma(200_000, seed=1, cv=cv))
        assert gaps.mean() == pytest.approx(1, abs=0.02)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.03)


def test_two_rates_differ_in_the_pace_alone():
    slow, fast = (at_rate(poisson(50, seed=3), rate) for rate in (1.0, 4.0))
    assert [4 * time for time in fast] == pytest.approx(slow)
    assert poisson(50, seed=3) != poisson(50, seed=4)


def test_the_rate_doubles_in_the_middle():
    even = poisson(40_000, seed=2)
    times = np.array(stepped(even, 0.5, 2.0))
    first, second = np.diff(times[:20_000]), np.diff(times[20_000:])
    assert first.mean() == pytest.approx(2, rel=0.03)
    assert second.mean() == pytest.approx(1, rel=0.03)
    assert (np.diff(times) > 0).all()


def test_every_document_is_read_before_one_is_read_again():
    order = shuffled_rounds(25, 10, seed=5)
    assert sorted(order[:10]) == list(range(10))
    assert order[10:] == order[:15]
    assert order[:10] != shuffled_rounds(10, 10, seed=6)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_wait_of_theory_is_that_of_a_simulated_queue(load):
    generator = np.random.default_rng(8)
    services = generator.choice([0.2, 1.0], 300_000, p=[0.6, 0.4])
    rate = load / services.mean()
    arrivals = np.cumsum(generator.exponential(1 / rate, len(services)))
    free_s = 0.0
    waits = []
    for arrival, service in zip(arrivals, services, strict=True):
        waits.append(max(0.0, free_s - arrival))
        free_s = max(free_s, arrival) + service
    assert mean_wait_s(rate, services.tolist()) == pytest.approx(np.mean(waits), rel=0.05)


def test_a_queue_that_cannot_keep_up_has_no_mean_wait():
    assert mean_wait_s(2.0, [0.5, 0.6]) is None


def test_a_rate_that_is_told_was_run_and_nine_of_ten_were_in_time():
    rates = ((4, 0.85), (1, 1.0), (2, 0.95))
    rows = [{"request_rate": r, "attainment": a, "completed": 44} for r, a in rates]
    assert in_time(rows) == (rows[2], rows[0])
    assert in_time(rows[1:]) == (rows[2], {})
    assert in_time(rows[:1]) == ({}, rows[0])
    assert in_time([*rows, {"request_rate": 1.5, "attainment": 0.5}])[0] == rows[1]
    result = {"rows": {"block": rows, "SGLang alone": rows[:1]}, "size": {}}
    text = next(shown("serving_study/s15", result))
    assert "95% of 44 requests were in time at 2.00 requests a second" in text
    assert "SGLang alone had 85% in time at 4.00 a second" in text


def test_a_request_that_waits_for_the_client_is_late_all_the_same():
    late = Answer(
        document=0,
        replica="",
        due_s=1.0,
        sent_s=1.5,
        tokens_s=[2.0, 2.1],
        output_ids=[1, 2],
        prompt_tokens=1,
        cached_tokens=0,
        outcome="none",
    )
    assert late.ttft_s == 1.0
    assert late.lag_s == 0.5
    assert late.latency_s == pytest.approx(1.1)


def test_run_reports_its_measures():
    answers = [answer(float(i), 0.1 if i % 4 else 0.5, 0.01, 0.03) for i in range(100)]
    measures = summary(answers, rate=1.0, target_s=0.2)
    assert measures["attainment"] == 0.75
    assert measures["request_goodput"] == pytest.approx(0.75 * measures["request_throughput"])
    assert measures["median_ttft_ms"] == pytest.approx(100)
    assert measures["p90_ttft_ms"] == pytest.approx(500)
    assert measures["median_itl_ms"] == pytest.approx(20)
    low, high = measures["median_ttft_ms_interval"]
    assert [low, high] == pytest.approx([100, 100])
    assert measures["outcomes"] == {"none": 100}
    assert len(trimmed(answers)) == 90


def test_intervals_hold_the_median_as_often_as_they_say():
    generator = np.random.default_rng(4)
    held = 0
    for _ in range(150):
        answers = [answer(0.0, ttft_s, 0.1) for ttft_s in generator.exponential(1.0, 60)]
        low, high = summary(answers, 1.0, 1.0)["median_ttft_ms_interval"]
        held += low <= 1000 * np.log(2) <= high
    assert 0.87 < held / 150 <= 1, "95 % of them, of 150"


def test_prompts_of_a_trace_are_equal_as_far_as_their_segments_are():
    lines = read_trace()
    first, second, other = map(prompt_of, lines[:3])
    assert lines[0].prompt[:2] == lines[1].prompt[:2] != lines[2].prompt[:2]
    assert len(first) == sum(num // 32 for _, num in lines[0].prompt)
    assert second[: len(first)] == first and len(second) > len(first)
    assert other[:16] != first[:16]


def study(out: Path, *names: str) -> None:
    """Run the command in this process, on servers that are forks of one process that has imported
    SGLang."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rig, "ENV", ENV)
        patched.setattr(rig, "ServerSpec", ServerSpec)
        main(["--quick", "--out", str(out), "--only", *names])


def found(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.server
def test_every_study_of_documents_on_tiny_servers(tmp_path):
    study(tmp_path, "s15", "s21", "s15b", "trace")
    expected = {"SGLang alone": "none", "full reuse": "reused", "block": "reused"}
    for name, rows in found(tmp_path, "s15")["rows"].items():
        for row in rows:
            assert row["same_answers"] == 1.0, name
            assert name not in expected or row["outcomes"][expected[name]] > 0, name
    requests = [json.loads(line) for line in (tmp_path / "s15_requests.jsonl").open()]
    layers = {"SGLang alone": set(), "full reuse": {0}, "block": {2}, "adaptive": {2, 3}}
    for request in requests:
        assert (
            request["recomputed_layers"] in layers[request["arm"]] or not request["reused_tokens"]
        )
    assert len(requests) == 4 * 6
    assert {len(request["tokens_s"]) for request in requests} == {4}
    assert found(tmp_path, "s21")["below_the_quality_floor"] == 0

    for name in ("s15b", "trace"):
        for row in found(tmp_path, name)["rows"]["block"]:
            assert row["late"] + row["outcomes"].get("reused", 0) == row["completed"], name
