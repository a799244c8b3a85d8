"""S15b and a trace: documents that the sender reads in the same stream, and prompts that share
their beginnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.simulate import read_trace
from benchmarks.simulate.mooncake import BLOCK, Line, of_trace, read_lines
from cachetree import ConfigError
from profiles.random_models import VOCAB_SIZE, random_prompt

from .arrivals import at_rate, poisson
from .client import Answer, Ask, run
from .measures import percentiles, summary, trimmed
from .rig import PAGE, Rig
from .studies import SEED, SERVED, Found, Idle, Say

LATE = "no_match"
"""Nobody offered the document yet."""
NEW_DOCUMENTS = count(100_000)
"""Seeds of those that nobody has read."""


def conversations(idle: Idle, say: Say) -> Found:
    """S15b: the sender is asked about a new document, and a receiver as much later as the target
    allows a first token to take.

    A receiver that does not find the document came too early: the sender had requests waiting, or
    its pages were not on offer yet. These are counted apart.
    """
    it, size = idle.rig, idle.rig.size
    streams = {load: poisson(size.num_requests, SEED) for load in size.loads[:2]}

    def asks(times_s: Sequence[float], controls: Mapping[str, Any] | None) -> list[Ask]:
        prompts = [random_prompt(size.document_tokens, next(NEW_DOCUMENTS)) for _ in times_s]
        questions = [random_prompt(size.question_tokens, 9000 + i) for i in range(len(times_s))]
        of_sender = [
            _ask(it, number, at_s, it.sender.url, prompts[number], None)
            for number, at_s in enumerate(times_s)
        ]
        return of_sender + [
            _ask(
                it,
                number,
                at_s + idle.target_s,
                it.replica(number, controls).url,
                [*prompts[number], *questions[number]],
                controls,
            )
            for number, at_s in enumerate(times_s)
        ]

    return _measure(idle, streams, asks, say)


def replayed(idle: Idle, say: Say) -> Found:
    """Requests of a trace, in less time and with shorter prompts; the sender has read them all.

    A block of 512 tokens becomes one page. Prompts that begin alike find the beginning in a
    replica's own cache too, as SGLang alone does.
    """
    it, size = idle.rig, idle.rig.size
    lines = lines_of(Path(size.trace), size.new_tokens)[: size.num_requests]
    prompts = [prompt_of(line) for line in lines]
    say(f"the sender reads {len(prompts)} prompts of {size.trace}")
    it.read([of[: len(of) // PAGE * PAGE] for of in prompts if len(of) >= PAGE])
    began = lines[0].timestamp
    per_s = len(lines) / (lines[-1].timestamp - began)
    times_s = [(line.timestamp - began) * per_s for line in lines]

    def asks(times_s: Sequence[float], controls: Mapping[str, Any] | None) -> list[Ask]:
        return [
            _ask(it, number, at_s, it.replica(number, controls).url, prompts[number], controls)
            for number, at_s in enumerate(times_s)
        ]

    return _measure(idle, {size.loads[-1]: times_s}, asks, say)


def lines_of(trace: Path, output_length: int) -> list[Line]:
    """Of a file in Mooncake's form or in that of `benchmarks/simulate`."""
    try:
        return read_lines(trace)
    except ConfigError:
        return of_trace(read_trace(trace), output_length)


def prompt_of(line: Line) -> list[int]:
    """Tokens that two prompts share where they share blocks; at least one."""
    tokens = [
        token
        for block in line.hash_ids
        for token in np.random.default_rng(abs(block)).integers(4, VOCAB_SIZE, PAGE).tolist()
    ]
    return tokens[: max(1, round(line.input_length * PAGE / BLOCK))]


def _measure(idle: Idle, streams: Mapping[float, Sequence[float]], asks: Any, say: Say) -> Found:
    """S15's contenders at each load; `streams` are at one request a second."""
    it = idle.rig
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SERVED}
    requests: list[dict[str, Any]] = []
    for load, times_s in streams.items():
        rate = load * idle.capacity_per_s
        for name in SERVED:
            controls = idle.contenders[name]
            say(f"{name} at {load} of full prefill's capacity, {times_s[-1] / rate:.0f} s")
            it.flush()
            answers = run(asks(at_rate(times_s, rate), controls))
            own = trimmed([of for of in answers if of.replica != it.sender.url])
            rows[name].append({"load": load, **summary(own, rate, idle.target_s), **_apart(own)})
            requests += [{"arm": name, "load": load, **msgspec.to_builtins(of)} for of in answers]
    return Found({**idle.summary(), "rows": rows}, requests)


def _apart(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was not found, and the TTFT without it."""
    found = [it.ttft_s for it in answers if it.outcome != LATE]
    return {
        "late": len(answers) - len(found),
        **(percentiles("found_ttft_ms", found) if len(found) > 1 else {}),
    }


def _ask(
    it: Rig,
    number: int,
    at_s: float,
    url: str,
    tokens: Sequence[int],
    controls: Mapping[str, Any] | None,
) -> Ask:
    return Ask(
        at_s=at_s,
        url=url,
        document=number,
        tokens=tokens,
        num_new=it.size.new_tokens,
        controls=controls,
    )
