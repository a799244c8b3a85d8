"""Time ways to move the same bytes, in turns; and make the pages that they move."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from benchmarks.random_servers import rotated
from cachetree import Family, Kind, ModelId, PageHash, Step

MODEL = ModelId("sender")
FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=2048,
    num_kv_heads=8,
    head_dim=128,
    rope="{}",
    tokenizer="t",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
E_LAYER = 3
STEPS = (*(Step(Kind.KV, layer) for layer in range(FAMILY.num_layers)), Step(Kind.E, E_LAYER))
"""All layers' KV and one layer's E, in the order that all contenders move them in."""


def sizes_of(num_pages: int) -> dict[Step, int]:
    return {step: num_pages * FAMILY.page_bytes(step.kind) for step in STEPS}


def pages_in(mib: int) -> list[PageHash]:
    """Make as many pages as take this many MiB; at least one."""
    num = max(1, (mib << 20) // sum(sizes_of(1).values()))
    return [PageHash(number.to_bytes(16, "big")) for number in range(num)]


Name = TypeVar("Name")


@dataclass(frozen=True)
class Speeds:
    """Speeds of one contender, one for each turn."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    """CPU seconds per GB. Other work on the machine hardly changes them."""

    def of(self, other: Speeds) -> float:
        """Return the median ratio of this contender's GB/s to the other's in the same turn."""
        turns = zip(self.gb_per_s, other.gb_per_s, strict=True)
        return median(ours / theirs for ours, theirs in turns)

    def medians(self) -> dict[str, float]:
        return {
            name: round(median(getattr(self, name)), 3) for name in ("gb_per_s", "cpu_s_per_gb")
        }


def race(
    contenders: Mapping[Name, Callable[[], object]],
    num_bytes: int,
    repetitions: int,
    cpu_s: Callable[[], float] = time.thread_time,
    prepare: Callable[[], object] = lambda: None,
) -> dict[Name, Speeds]:
    """Run all contenders in turns; each is first as often as the others. `prepare` runs before
    every run, untimed. `cpu_s` reads a contender's CPU time, by default this thread's."""
    speeds = {name: Speeds() for name in contenders}
    for turn in range(repetitions):
        for name in rotated(list(contenders), turn):
            prepare()
            began_s, began_cpu_s = time.perf_counter(), cpu_s()
            contenders[name]()
            spent_s, gigabytes = cpu_s() - began_cpu_s, num_bytes / 1e9
            speeds[name].gb_per_s.append(gigabytes / (time.perf_counter() - began_s))
            speeds[name].cpu_s_per_gb.append(spent_s / gigabytes)
    return speeds
