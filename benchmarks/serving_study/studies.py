"""S15 and S21: requests for a shared set of documents, and each contender on an idle server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from .arrivals import at_rate, gamma, poisson, shuffled_rounds, stepped
from .client import Answer, Ask, run
from .measures import mean_wait_s, summary, trimmed
from .rig import Rig

ALONE = "SGLang alone"
SERVED = (ALONE, "full reuse", "block", "adaptive")
SEED = 7
TARGET = 2.0
"""Target for the TTFT, as a multiple of a full prefill's TTFT on an idle server."""
Say = Callable[[str], None]
Controls = Mapping[str, Any] | None
"""Controls of requests for the extension. None: SGLang alone."""
Rows = dict[str, list[dict[str, Any]]]
"""Rows of a study's table, by contender."""


@dataclass(frozen=True)
class Idle:
    """Times and answers of each contender on an idle server."""

    rig: Rig
    contenders: Mapping[str, Controls]
    """Controls by contender. By the made-up profile, the wide block answers better."""
    answers: Mapping[str, Sequence[Answer]]
    """Answers of each measured contender, one for every document."""
    target_s: float
    """Target for the TTFT."""

    @property
    def capacity_per_s(self) -> float:
        """Requests per second that all replicas can serve by full prefill, one prompt after the
        other."""
        return self.rig.size.num_replicas / float(np.mean(self.services_s(ALONE)))

    def services_s(self, name: str) -> list[float]:
        return [answer.latency_s for answer in self.answers[name]]

    def summary(self) -> dict[str, Any]:
        means = {name: float(np.mean(self.services_s(name))) for name in self.answers}
        return {
            "capacity_per_s": self.capacity_per_s,
            "ttft_target_ms": 1000 * self.target_s,
            "idle_ttft_ms": {name: _mean_ttft_ms(of) for name, of in self.answers.items()},
            "idle_latency_ms": {name: 1000 * of for name, of in means.items()},
            "bound": {name: means[ALONE] / of for name, of in means.items()},
        }


@dataclass(frozen=True)
class Found:
    """Result of a study."""

    summary: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]]
    """Every request that was sent, as its `client.Answer`, contender and load."""


def measure_idle(rig: Rig, names: Collection[str], say: Say) -> Idle:
    """Measure these contenders and SGLang alone, on idle servers. Raises AssertionError if a
    contender does not reuse as its controls demand."""
    (start, stop), (wide_start, wide_stop) = rig.size.block, rig.size.wide_block
    answers = {ALONE: _answers_when_idle(rig, None, say)}
    target_s = TARGET * float(np.median([answer.ttft_s for answer in answers[ALONE]]))
    contenders: dict[str, Controls] = {
        ALONE: None,
        "full reuse": {"block": "none"},
        "block": {"block": f"{start}:{stop}"},
        "wide block": {"block": f"{wide_start}:{wide_stop}"},
        "adaptive": {"ttft_target_ms": 1000 * target_s},
    }
    for name, controls in contenders.items():
        if controls is not None and name in names:
            answers[name] = _answers_when_idle(rig, controls, say)
            outcomes = {answer.outcome for answer in answers[name]}
            assert "block" not in controls or outcomes == {"reused"}, f"{name}: {outcomes}"
    return Idle(rig, contenders, answers, target_s)


def poisson_arrivals(idle: Idle, say: Say) -> Found:
    """S15: Poisson arrivals, each for one of a shared set of documents; the replicas take turns.

    A replica serves one prompt after the other. So reuse can raise the throughput at most by the
    ratio of two times to serve a request, decoding included (`bound`).
    """
    size = idle.rig.size
    times_s = poisson(size.num_requests, SEED)
    loads = (*size.loads, *size.more_loads)
    streams = {load: at_rate(times_s, load * idle.capacity_per_s) for load in loads}
    rows, requests = _measure(idle, streams, SERVED, say)
    for name, of in rows.items():
        for row in of:
            wait_s = mean_wait_s(row["request_rate"] / size.num_replicas, idle.services_s(name))
            row["mean_wait_ms_in_theory"] = None if wait_s is None else 1000 * wait_s
    return Found({**idle.summary(), "rows": rows}, requests)


def bursts(idle: Idle, say: Say) -> Found:
    """S21: share of requests that miss the TTFT target. The rate doubles in the middle of a run, or
    requests come in bursts (gaps of a Gamma distribution, coefficient of variation 2).

    The contender `adaptive` states the target. The server then chooses one of two blocks.
    """
    size = idle.rig.size
    names = [ALONE, "wide block", "adaptive"]
    even, uneven = poisson(size.num_requests, SEED), gamma(size.num_requests, SEED, cv=2.0)
    rows_of: dict[str, Any] = {}
    requests: list[dict[str, Any]] = []
    for kind in ("step", "gamma"):
        streams = {
            load: stepped(even, load * idle.capacity_per_s, 2.0)
            if kind == "step"
            else at_rate(uneven, load * idle.capacity_per_s)
            for load in size.burst_loads
        }
        rows_of[kind], sent = _measure(idle, streams, names, say)
        requests += [{"kind": kind, **it} for it in sent]
    least = size.block[1] - size.block[0]
    below = [
        it
        for it in requests
        if it["arm"] == "adaptive" and it["reused_tokens"] and it["recomputed_layers"] < least
    ]
    return Found(
        {**idle.summary(), "below_the_quality_floor": len(below), "rows": rows_of}, requests
    )


def _measure(
    idle: Idle, streams: Mapping[float, Sequence[float]], names: Sequence[str], say: Say
) -> tuple[Rows, list[dict[str, Any]]]:
    """Call `measure` with requests about the shared set of documents."""
    size = idle.rig.size
    documents = shuffled_rounds(size.num_requests, size.num_documents, SEED)

    def asks(times_s: Sequence[float], controls: Controls) -> list[Ask]:
        due = zip(times_s, documents, strict=True)
        return [idle.rig.ask(number, of, at_s, controls) for number, (at_s, of) in enumerate(due)]

    def more(answers: Sequence[Answer]) -> dict[str, Any]:
        alike = _share_alike(answers, idle)
        return {"mean_ttft_ms": _mean_ttft_ms(trimmed(answers)), "same_answers": alike}

    return measure(idle, streams, names, asks, more, say)


def measure(
    idle: Idle,
    streams: Mapping[float, Sequence[float]],
    names: Sequence[str],
    asks: Callable[[Sequence[float], Controls], list[Ask]],
    more: Callable[[Sequence[Answer]], dict[str, Any]],
    say: Say,
) -> tuple[Rows, list[dict[str, Any]]]:
    """Measure each contender at each load; return the rows and all requests. `streams` has the
    requests' times by load. `more` computes extra columns of a row from the replicas' answers.

    SGLang alone is skipped at loads that only reuse can bear.
    """
    rig = idle.rig
    rows: Rows = {name: [] for name in names}
    requests: list[dict[str, Any]] = []
    for load, times_s in streams.items():
        for name in names:
            controls = idle.contenders[name]
            if controls is None and load in rig.size.more_loads:
                continue
            say(f"{name} at {load} of full prefill's capacity, {times_s[-1]:.0f} s")
            rig.flush()
            answers = run(asks(times_s, controls))
            own = [of for of in answers if of.replica != rig.sender.url]
            figures = summary(trimmed(own), load * idle.capacity_per_s, idle.target_s)
            rows[name].append({"load": load, **figures, **more(own)})
            requests += [{"arm": name, "load": load, **msgspec.to_builtins(of)} for of in answers]
    return rows, requests


def _answers_when_idle(rig: Rig, controls: Mapping[str, Any] | None, say: Say) -> list[Answer]:
    """Ask about every document, one request after the other, from empty caches. Before that each
    replica answers one request, because a server's first requests are slow."""
    say(f"an idle server, {controls or ALONE}")
    rig.flush()
    for number in range(rig.size.num_replicas):
        run([rig.ask(number, number, 0.0, controls)])
    rig.flush()
    asks = [rig.ask(of, of, 0.0, controls) for of in range(rig.size.num_documents)]
    return [answer for ask in asks for answer in run([ask])]


def _share_alike(answers: Sequence[Answer], idle: Idle) -> float:
    """Return the share of answers that equal an idle server's answer with the same layers
    recomputed."""
    right = {_what_was_done(it): it.output_ids for of in idle.answers.values() for it in of}
    return sum(it.output_ids == right[_what_was_done(it)] for it in answers) / len(answers)


def _what_was_done(answer: Answer) -> tuple[int, bool, int]:
    return answer.document, answer.reused_tokens > 0, answer.recomputed_layers


def _mean_ttft_ms(answers: Sequence[Answer]) -> float:
    return 1000 * float(np.mean([it.ttft_s for it in answers]))
