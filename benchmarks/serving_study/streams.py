"""S15b and a trace: documents that the sender reads in the same stream, and prompts that share
their beginnings."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.random_servers import PAGE
from profiles.random_models import random_prompt

from .arrivals import at_rate, poisson
from .client import Answer, Ask
from .measures import percentiles, trimmed
from .rig import Rig
from .studies import SEED, SERVED, Controls, Found, Idle, Say, measure

LATE = "no_match"
"""Nobody offered the document yet."""
TRACE = Path(__file__).with_name("multi_agent.jsonl")
SHORTER = 32
"""Times, than the prompts of the trace."""
NEW_DOCUMENTS = count(100_000)
"""Seeds of those that nobody has read."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the trace: segments (name, tokens) for text, and when they were sent."""

    at_s: float
    model: str
    prompt: tuple[tuple[str, int], ...]


def read_trace() -> list[Request]:
    """All requests; the first line of the file describes the model they were made for."""
    lines = TRACE.read_bytes().splitlines()[1:]
    return [msgspec.json.decode(line, type=Request) for line in lines]


def conversations(idle: Idle, say: Say) -> Found:
    """S15b: the sender is asked about a new document, and a receiver as much later as the target
    allows a first token to take.

    A receiver that does not find the document came too early: the sender had requests waiting, or
    its pages were not on offer yet. These are counted apart.
    """
    it, size = idle.rig, idle.rig.size
    times_s = poisson(size.num_requests, SEED)

    def asks(times_s: Sequence[float], controls: Controls) -> list[Ask]:
        found = []
        for number, at_s in enumerate(times_s):
            prompt = random_prompt(size.document_tokens, next(NEW_DOCUMENTS))
            tokens = [*prompt, *random_prompt(size.question_tokens, 9000 + number)]
            own = _ask(it, number, at_s + idle.target_s, tokens, controls)
            of_sender = _ask(it, number, at_s, prompt, None)
            found += [own, replace(of_sender, url=it.sender.url)]
        return found

    return _found(idle, dict.fromkeys(size.loads[:2], times_s), asks, say)


def replayed(idle: Idle, say: Say) -> Found:
    """Requests of a trace, in less time and with shorter prompts; the sender has read them all.

    Prompts that begin alike find the beginning in a replica's own cache too, as SGLang alone does.
    """
    it, size = idle.rig, idle.rig.size
    lines = read_trace()[: size.num_requests]
    prompts = [prompt_of(line) for line in lines]
    say(f"the sender reads {len(prompts)} prompts")
    it.read([of[: len(of) // PAGE * PAGE] for of in prompts if len(of) >= PAGE])
    began_s = lines[0].at_s
    per_s = len(lines) / (lines[-1].at_s - began_s)
    times_s = [(line.at_s - began_s) * per_s for line in lines]

    def asks(times_s: Sequence[float], controls: Controls) -> list[Ask]:
        return [
            _ask(it, number, at_s, prompts[number], controls) for number, at_s in enumerate(times_s)
        ]

    return _found(idle, {size.loads[-1]: times_s}, asks, say)


def prompt_of(line: Request) -> list[int]:
    """Tokens that two prompts share where they share segments."""
    return [
        token
        for name, num_tokens in line.prompt
        for token in random_prompt(max(1, num_tokens // SHORTER), zlib.crc32(name.encode()))
    ]


def _found(idle: Idle, streams: Mapping[float, Sequence[float]], asks: Any, say: Say) -> Found:
    """S15's contenders at each load; `streams` are at one request a second."""
    at = {load: at_rate(of, load * idle.capacity_per_s) for load, of in streams.items()}
    rows, requests = measure(idle, at, SERVED, asks, _apart, say)
    return Found({**idle.summary(), "rows": rows}, requests)


def _apart(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was not found, and the TTFT without it."""
    kept = trimmed(answers)
    found = [it.ttft_s for it in kept if it.outcome != LATE]
    return {
        "late": len(kept) - len(found),
        **(percentiles("found_ttft_ms", found) if len(found) > 1 else {}),
    }


def _ask(it: Rig, number: int, at_s: float, tokens: Sequence[int], controls: Controls) -> Ask:
    """About a document of its own."""
    return replace(it.ask(number, 0, at_s, controls), document=number, tokens=tokens)
