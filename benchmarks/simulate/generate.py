"""Traces from a seed: the same seed gives the same bytes, on every machine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import log
from random import Random
from typing import Final

from cachetree.checkpoint import Family

from .trace import Header, Request, Trace

_FAMILY: Final = Family(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_kv_heads=8,
    head_dim=128,
    rope="{}",
    tokenizer="llama-3",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
"""An 8B model: 128 KiB of KV per token."""


class _Dice:
    """Draws by `random()` alone, whose sequence Python guarantees."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def integer(self, low: int, high: int) -> int:
        """Both included."""
        return low + int((high - low + 1) * self._random())

    def wait_s(self, mean_s: float) -> float:
        """Between two events of a Poisson process."""
        return -mean_s * log(1 - self._random())

    def pick(self, cumulative: list[float]) -> int:
        return bisect_right(cumulative, cumulative[-1] * self._random())


def _zipf(num: int, exponent: float) -> list[float]:
    """Cumulative weights: thing i is used in proportion to 1 / (i + 1) ** exponent."""
    return list(accumulate([(i + 1) ** -exponent for i in range(num)]))


def _multi_agent(dice: _Dice) -> Iterator[Request]:
    """Four models work on tasks in rounds and read the same documents and what they said before.

    A task has one to three of 50 documents, some of them dear to many tasks, and a conversation
    that every agent reads and adds to. One request in six or so reads something once: a page that
    is indexed and never asked for again.
    """
    agents = ("planner", "researcher", "coder", "critic")
    sizes = [dice.integer(1500, 9000) for _ in range(50)]
    popularity = _zipf(len(sizes), 0.8)
    begins_at_s = 0.0
    for task in range(110):
        begins_at_s += dice.wait_s(30)
        at_s = begins_at_s
        documents = sorted({dice.pick(popularity) for _ in range(dice.integer(1, 3))})
        reading = tuple([(f"doc-{it}", sizes[it]) for it in documents])
        said = dice.integer(100, 400)
        for _ in range(dice.integer(2, 5)):
            for agent in agents:
                prompt = (*reading, (f"task-{task}", said))
                yield Request(at_s=round(at_s, 3), model=agent, prompt=prompt)
                said += dice.integer(100, 500)
                at_s += dice.between(4, 20)
                if dice.chance(0.2):
                    once = (f"once-{task}-{said}", dice.integer(2000, 12000))
                    yield Request(at_s=round(at_s, 3), model="researcher", prompt=(once,))


def _multi_lora(dice: _Dice) -> Iterator[Request]:
    """48 adapters of one base model, few of them popular, and conversations of their users.

    Each adapter has one of six system prompts and examples of its own; its KV of them is its own
    too. Half the conversations are one question; the others come back after a while, with all that
    was said. Now and then somebody pastes a long text.
    """
    systems = [dice.integer(800, 4000) for _ in range(6)]
    examples = [dice.integer(0, 2500) for _ in range(48)]
    popularity = _zipf(len(examples), 1.0)
    begins_at_s = 0.0
    for session in range(1100):
        begins_at_s += dice.wait_s(2.5)
        at_s = begins_at_s
        adapter = dice.pick(popularity)
        head = [(f"system-{adapter % len(systems)}", systems[adapter % len(systems)])]
        if examples[adapter]:
            head.append((f"examples-{adapter}", examples[adapter]))
        said = dice.integer(3000, 10000) if dice.chance(0.12) else dice.integer(30, 600)
        for _ in range(1 if dice.chance(0.5) else dice.integer(2, 5)):
            prompt = (*head, (f"session-{session}", said))
            yield Request(at_s=round(at_s, 3), model=f"base+lora-{adapter}", prompt=prompt)
            said += dice.integer(100, 700)
            at_s += dice.between(15, 120)


_REQUESTS: Final[dict[str, Callable[[_Dice], Iterator[Request]]]] = {
    "multi_agent": _multi_agent,
    "multi_lora": _multi_lora,
}
GENERATORS: Final = tuple(_REQUESTS)


def generate(name: str, seed: int) -> Trace:
    """The trace of one of `GENERATORS`."""
    requests = sorted(_REQUESTS[name](_Dice(seed)), key=lambda it: it.at_s)
    return Trace(header=Header(family=_FAMILY), requests=requests)
