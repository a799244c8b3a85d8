"""Two more studies: S15b, in which the sender reads documents in the same stream of requests, and a
trace of prompts that share their beginnings."""

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
"""Outcome of a request for a document that no sender offered yet."""
TRACE = Path(__file__).with_name("multi_agent.jsonl")
SHORTER = 32
"""Factor by which prompts are shorter than in the trace."""
NEW_DOCUMENTS = count(100_000)
"""Seeds of documents that no model has read."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the trace: the time of a request, and its prompt as segments (name, tokens)."""

    at_s: float
    model: str
    prompt: tuple[tuple[str, int], ...]


def read_trace() -> list[Request]:
    """Read all requests. The first line of the file describes the model for which they were
    made."""
    lines = TRACE.read_bytes().splitlines()[1:]
    return [msgspec.json.decode(line, type=Request) for line in lines]


def conversations(idle: Idle, say: Say) -> Found:
    """S15b: the sender gets a request about a new document. A receiver gets a request about it
    later, after the target for the time to first token.

    If the receiver does not find the document, the sender had requests waiting, or did not offer
    the pages yet. These requests are counted separately.
    """
    rig, size = idle.rig, idle.rig.size
    times_s = poisson(size.num_requests, SEED)

    def asks(times_s: Sequence[float], controls: Controls) -> list[Ask]:
        all_asks = []
        for number, at_s in enumerate(times_s):
            prompt = random_prompt(size.document_tokens, next(NEW_DOCUMENTS))
            tokens = [*prompt, *random_prompt(size.question_tokens, 9000 + number)]
            own = _ask(rig, number, at_s + idle.target_s, tokens, controls)
            of_sender = _ask(rig, number, at_s, prompt, None)
            all_asks += [own, replace(of_sender, url=rig.sender.url)]
        return all_asks

    return _found(idle, dict.fromkeys(size.loads[:2], times_s), asks, say)


def replayed(idle: Idle, say: Say) -> Found:
    """Replay a trace, in less time and with shorter prompts. The sender has read all prompts.

    A replica's own cache may also have the beginning of a prompt, as in SGLang alone.
    """
    rig, size = idle.rig, idle.rig.size
    lines = read_trace()[: size.num_requests]
    prompts = [prompt_of(line) for line in lines]
    say(f"the sender reads {len(prompts)} prompts")
    rig.read([of[: len(of) // PAGE * PAGE] for of in prompts if len(of) >= PAGE])
    began_s = lines[0].at_s
    per_s = len(lines) / (lines[-1].at_s - began_s)
    times_s = [(line.at_s - began_s) * per_s for line in lines]

    def asks(times_s: Sequence[float], controls: Controls) -> list[Ask]:
        return [
            _ask(rig, number, at_s, prompts[number], controls)
            for number, at_s in enumerate(times_s)
        ]

    return _found(idle, {size.loads[-1]: times_s}, asks, say)


def prompt_of(line: Request) -> list[int]:
    """Make the tokens of a prompt. Equal segments give equal tokens, so prompts share them."""
    return [
        token
        for name, num_tokens in line.prompt
        for token in random_prompt(max(1, num_tokens // SHORTER), zlib.crc32(name.encode()))
    ]


def _found(idle: Idle, streams: Mapping[float, Sequence[float]], asks: Any, say: Say) -> Found:
    """Measure the contenders of S15 at each load. `streams` has the requests' times by load, at a
    mean rate of one request a second."""
    at = {load: at_rate(of, load * idle.capacity_per_s) for load, of in streams.items()}
    rows, requests = measure(idle, at, SERVED, asks, _apart, say)
    return Found({**idle.summary(), "rows": rows}, requests)


def _apart(answers: Sequence[Answer]) -> dict[str, Any]:
    """Count requests that did not find their document, and summarise the TTFT of the others."""
    measured = trimmed(answers)
    ttfts_s = [it.ttft_s for it in measured if it.outcome != LATE]
    return {
        "late": len(measured) - len(ttfts_s),
        **(percentiles("found_ttft_ms", ttfts_s) if len(ttfts_s) > 1 else {}),
    }


def _ask(rig: Rig, number: int, at_s: float, tokens: Sequence[int], controls: Controls) -> Ask:
    """Build a request about a document that no other request is about."""
    return replace(rig.ask(number, 0, at_s, controls), document=number, tokens=tokens)
