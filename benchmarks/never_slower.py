"""On simulated servers: is the plan that our policy chooses never slower than a full prefill?

    python -m benchmarks.never_slower [--json benchmarks/results/never_slower.json]

We simulate servers with a GPU and a link. True times follow from public figures of the GPU. First a
server serves 400 prompts of 32 to 40,000 tokens, with noise and rare delays. From their times the
product's code estimates costs. Then the product's policy chooses a plan for prompts of several
lengths. We compare true times, which the policy never sees: of this plan, of a full prefill, and of
every proven block.

Physics of Llama-3-8B:

    a layer   the longest of: launches of its kernels, its multiplications, reads of its weights
    link      running fetches share its bandwidth evenly
    copies    host to device: E before the block, and KV while the block is computed
    overhead  for each fetch: a round trip, and the time until the scheduler sees its end

If the server gives up the fetch of a plan, the plan's time is the wait and a full prefill.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from benchmarks import result
from benchmarks.random_servers import profile_of
from cachetree import Location, Span
from cachetree.checkpoint import ModelIdentity
from cachetree.planning import (
    BlockQuality,
    Costs,
    Demand,
    Match,
    Patience,
    Plan,
    PrefillCost,
    choose,
    index_profiles,
    layers_of_work,
    patience_for,
)
from cachetree.transport.config import PeerConfig
from cachetree.transport.pace import Bandwidth
from sglang_droidspeak.cost import Meter

NUM_LAYERS, HIDDEN, MLP, KV_WIDTH = 32, 4096, 14336, 1024
"""Sizes of Llama-3-8B."""
WEIGHTS = 2 * HIDDEN**2 + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP
KV_BYTES, E_BYTES = 2 * 2 * KV_WIDTH, 2 * HIDDEN
"""Bytes of KV and of E, per token and layer, in bfloat16."""
PAGE, NUM_NEW, STEP_TOKENS = 16, 32, 8192
ROUND_TRIP_S, NOTICE_S = 0.0004, 0.0006
OVERHEAD_S = ROUND_TRIP_S + NOTICE_S
"""Seconds that any reuse adds: a round trip, and the time until the scheduler sees its end."""
COPY_LAUNCHES_S = 24 * 2 * 10e-6
"""Seconds to launch a load's work on the GPU. For each of 24 layers we launch a copy, and a kernel
that scatters the copied KV into slots. A launch takes 10 µs."""
BLOCKS = (Span(8, 16), Span(4, 20), Span(0, 28))
GB_PER_S = tuple(0.05 * 1000 ** (i / 12) for i in range(13))
TOKENS = (100, 200, 400, 800, 1600, 3200, 6400, 10_000, 20_000, 40_000)
FETCHES = (0, 1, 4, 16)
FRAME_BYTES = PeerConfig().frame_bytes
NUM_LOOKS = 32
"""Number of checks of a fetch's progress, each after another frame. A server checks after every
frame."""
RATE_S = 0.2
"""Seconds that a fetch runs before its rate counts, as in `sglang_droidspeak.request.arrivals`."""
FAR = Location("tcp://far:1")


@dataclass(frozen=True)
class Device:
    """Peak figures from a data sheet, and the share of them that is commonly reached."""

    name: str
    flop_per_s: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    layer_launches_s: float = 15 * 5e-6
    """Seconds to launch a layer's kernels, at 5 µs each outside a CUDA graph."""
    utilisation: float = 0.5

    def pass_s(self, tokens: Span, num_layers: float) -> float:
        """Seconds of one forward pass through `num_layers` layers, without noise."""
        work = len(tokens) * (2 * WEIGHTS + 2 * HIDDEN * (tokens.start + tokens.stop))
        layer_s = max(
            self.layer_launches_s,
            work / (self.utilisation * self.flop_per_s),
            2 * WEIGHTS / self.hbm_bytes_per_s,
        )
        return num_layers * layer_s

    def passes_s(self, tokens: Span, num_layers: float) -> float:
        return sum(self.pass_s(it, num_layers) for it in chunks(tokens))


DEVICES = (
    # nvidia.com/en-us/data-center/a100: 312 TFLOP/s dense bfloat16, 2,039 GB/s (80 GB SXM), PCIe
    # Gen4 64 GB/s both ways; a page-locked copy reaches about 25 GB/s in one direction.
    Device("A100", 312e12, 2.039e12, 25e9),
    # nvidia.com/en-us/data-center/h100: 1,979 TFLOP/s bfloat16 with sparsity, half of it dense,
    # 3.35 TB/s (SXM), PCIe Gen5 128 GB/s both ways; a copy reaches about 50 GB/s in one direction.
    Device("H100", 989e12, 3.35e12, 50e9),
)


def chunks(tokens: Span) -> Iterator[Span]:
    """Cut a prefill into chunks as SGLang does."""
    for start in range(tokens.start, tokens.stop, STEP_TOKENS):
        yield Span(start, min(tokens.stop, start + STEP_TOKENS))


class Server:
    """A simulated server. It learns the speeds of one device and one link by the product's code."""

    def __init__(self, device: Device, bytes_per_s: float, seed: int) -> None:
        self.device, self.bytes_per_s = device, bytes_per_s
        self._random = random.Random(f"{seed} {device.name} {bytes_per_s}")
        self._now_s = 0.0
        prior = PrefillCost.of_sizes(HIDDEN)
        self.meter = Meter("cpu", NUM_LAYERS, STEP_TOKENS, prior, self._clock)
        self.bandwidth = Bandwidth(self._clock)

    def _clock(self) -> float:
        return self._now_s

    def _pass(self, seconds: float, spread: float) -> None:
        is_held_up = self._random.random() < 0.02
        self._now_s += self._noisy(seconds, spread) * (10 if is_held_up else 1)

    def _noisy(self, seconds: float, spread: float) -> float:
        return seconds * self._random.lognormvariate(0.0, spread)

    def _fetch(self, num_bytes: int) -> None:
        began_s = self._now_s
        self._pass(num_bytes / self.bytes_per_s, 0.05)
        self._now_s += self._noisy(ROUND_TRIP_S, 0.3)
        if num_bytes >= Bandwidth.MIN_SAMPLE_BYTES:
            self.bandwidth.sample(num_bytes, self._now_s - began_s)
        self.meter.noticed(self._noisy(NOTICE_S, 0.5))
        copy_s = self._noisy(num_bytes / self.device.pcie_bytes_per_s, 0.1)
        self.meter.loaded(num_bytes, copy_s + COPY_LAUNCHES_S)

    def serve(self, num_requests: int) -> None:
        """Serve prompts of all lengths: every second with a block, every fourth with a fetch."""
        for number in range(num_requests):
            num_tokens = int(math.exp(self._random.uniform(math.log(32), math.log(40_000))))
            if number % 2:
                work = len(BLOCKS[number // 2 % len(BLOCKS)]) - 1
                for chunk in chunks(Span(0, num_tokens)):
                    with self.meter.block([chunk], work):
                        self._pass(self.device.pass_s(chunk, work), 0.03)
            for chunk in chunks(Span(num_tokens if number % 2 else 0, num_tokens + NUM_NEW)):
                with self.meter.forward([chunk]):
                    self._pass(self.device.pass_s(chunk, NUM_LAYERS), 0.03)
            if number % 4 == 1:
                if self.bandwidth.link is not None:
                    self.costs([])  # The plan was made from what was learned until then.
                self._fetch(num_tokens * KV_BYTES * 24)

    def costs(self, backlog: Sequence[int]) -> Costs:
        link = self.bandwidth.link
        assert link is not None
        fixed_s = link.fixed_s + self.meter.notice_s
        link = replace(
            link,
            fixed_s=fixed_s,
            backlog=backlog,
            frame_bytes=FRAME_BYTES,
            copy_byte_s=self.meter.copy_byte_s,
        )
        return Costs(
            kv_page_bytes=PAGE * KV_BYTES,
            e_page_bytes=PAGE * E_BYTES,
            prefill=self.meter.prefill,
            recompute=self.meter.recompute,
            links={FAR: link},
        )


@dataclass(frozen=True)
class Truth:
    """True times of a plan, which the policy never sees."""

    server: Server
    num_tokens: int
    backlog: Sequence[int]

    @property
    def full_s(self) -> float:
        return self.server.device.passes_s(Span(0, self.num_tokens + NUM_NEW), NUM_LAYERS)

    def wait_s(self, plan: Plan) -> float:
        come_s = max(self._come_s(plan, 0), self._come_s(plan, 1) - self._recompute_s(plan))
        return OVERHEAD_S + come_s

    def reuse_s(self, plan: Plan) -> float:
        rest = Span(plan.pages.stop * PAGE, self.num_tokens + NUM_NEW)
        pcie = self.server.device.pcie_bytes_per_s
        e_bytes, kv_bytes = self._bytes(plan)
        copied_s = COPY_LAUNCHES_S + kv_bytes / pcie
        loaded_s = max(e_bytes / pcie + self._recompute_s(plan), copied_s)
        own_s = self.server.device.passes_s(rest, NUM_LAYERS)
        return self.wait_s(plan) + loaded_s + own_s

    def served_s(self, plan: Plan | None, patience: Patience | None) -> float:
        """Seconds until the answer. A plan that is given up costs a full prefill on top."""
        if plan is None:
            return self.full_s
        given_up_s = None if patience is None else self._given_up_s(plan, patience)
        return self.reuse_s(plan) if given_up_s is None else given_up_s + self.full_s

    def _given_up_s(self, plan: Plan, patience: Patience) -> float | None:
        """Seconds until the server gives up the fetch because a frame is too late, or None."""
        num_bytes, ready_s = sum(self._bytes(plan)), self.wait_s(plan)
        most_s = patience.most_s + self._recompute_s(plan)
        num_frames = -(-num_bytes // FRAME_BYTES)
        for frame in range(0, num_frames, -(-num_frames // NUM_LOOKS)):
            landed = frame * FRAME_BYTES
            came_s = ROUND_TRIP_S + self._carried_s(landed) if landed else 0.0
            next_s = ROUND_TRIP_S + self._carried_s(min(landed + FRAME_BYTES, num_bytes))
            limit_s = patience.limit_s(landed)
            if landed:
                rest_of_elapsed = patience.link.rest_s(1.0, landed, num_bytes)
                limit_s = min(limit_s, max(RATE_S, most_s / (1 + rest_of_elapsed)))
            if came_s >= ready_s:
                break
            if min(next_s, ready_s) > limit_s:
                return max(limit_s, came_s)
        return None if ready_s <= patience.most_s else patience.most_s

    def _bytes(self, plan: Plan) -> tuple[int, int]:
        num_tokens = len(plan.pages) * PAGE
        e, kv = len(plan.transition_layers) * E_BYTES, len(plan.loaded_layers) * KV_BYTES
        return num_tokens * e, num_tokens * kv

    def _come_s(self, plan: Plan, with_kv: int) -> float:
        e_bytes, kv_bytes = self._bytes(plan)
        return self._carried_s(e_bytes + with_kv * kv_bytes)

    def _carried_s(self, mine: int) -> float:
        num_bytes = mine + sum(min(it, mine) for it in self.backlog)
        return num_bytes / self.server.bytes_per_s

    def _recompute_s(self, plan: Plan) -> float:
        tokens = Span(plan.pages.start * PAGE, plan.pages.stop * PAGE)
        return self.server.device.passes_s(tokens, layers_of_work(plan))


SENDER = ModelIdentity(
    architecture="LlamaForCausalLM",
    num_layers=NUM_LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope="{}",
    tokenizer="t",
    weights="s",
)
RECEIVER = msgspec.structs.replace(SENDER, weights="r")
PROVEN = [BlockQuality(start=it.start, stop=it.stop, quality=0.88) for it in BLOCKS]
PROFILES = index_profiles([profile_of(SENDER, RECEIVER, *PROVEN[::-1])])


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one request: on a device, over a link, of a length, beside some other fetches."""

    device: str
    gb_per_s: float
    num_tokens: int
    num_fetches: int
    block: tuple[int, int] | None
    """Recomputed layers. None for a full prefill."""
    of_full: float
    """Time of the chosen plan, relative to a full prefill."""
    of_best: float
    """Time of the chosen plan, relative to the best fixed plan."""


def cell(server: Server, num_tokens: int, num_fetches: int) -> Cell:
    num_pages = num_tokens // PAGE
    other_bytes = num_tokens * KV_BYTES * 24
    backlog = [other_bytes * (1 + i) // num_fetches for i in range(num_fetches)]
    truth = Truth(server, num_tokens, backlog)
    demand = Demand(
        receiver=RECEIVER.model_id,
        num_layers=NUM_LAYERS,
        page_size=PAGE,
        num_pages=num_pages,
        num_new_tokens=num_tokens + NUM_NEW - num_pages * PAGE,
        num_waiting=num_fetches,
    )
    everything = dict.fromkeys(range(NUM_LAYERS), num_pages)
    match = Match(model=SENDER.model_id, location=FAR, num_pages=num_pages, e_pages=everything)
    costs = server.costs(backlog)
    chosen = choose(demand, [match], PROFILES, costs)
    plan = chosen if isinstance(chosen, Plan) else None
    took_s = truth.served_s(plan, None if plan is None else patience_for(plan, demand, costs))
    fixed = [_fixed(block, num_pages) for block in BLOCKS]
    best_s = min([truth.full_s, *(truth.reuse_s(it) for it in fixed)])
    return Cell(
        device=server.device.name,
        gb_per_s=server.bytes_per_s / 1e9,
        num_tokens=num_tokens,
        num_fetches=num_fetches,
        block=None if plan is None else (plan.block.start, plan.block.stop),
        of_full=took_s / truth.full_s,
        of_best=took_s / best_s,
    )


def _fixed(block: Span, num_pages: int) -> Plan:
    return Plan(
        sender=SENDER.model_id,
        receiver=RECEIVER.model_id,
        location=FAR,
        pages=Span(0, num_pages),
        block=block,
        num_layers=NUM_LAYERS,
    )


def sweep(num_requests: int = 400, seed: int = 0) -> list[Cell]:
    """Measure every device, link, length and number of fetches."""
    cells = []
    for device, gb_per_s in itertools.product(DEVICES, GB_PER_S):
        server = Server(device, gb_per_s * 1e9, seed)
        server.serve(num_requests)
        cells += [cell(server, *it) for it in itertools.product(TOKENS, FETCHES)]
    return cells


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the worst ratios over all cells, and the number of cells in which another plan would
    have been 10 % faster."""
    return {
        "num_cells": len(cells),
        "num_reused": sum(it.block is not None for it in cells),
        "of_full": max(it.of_full for it in cells),
        "of_best": max(it.of_best for it in cells),
        "num_of_best": sum(it.of_best > 1.1 for it in cells),
    }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="served before it is judged")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    environment = result.here()
    cells = [cell for seed in range(args.seeds) for cell in sweep(args.requests, seed)]
    results = {
        it.name: summary([cell for cell in cells if cell.device == it.name]) for it in DEVICES
    }
    asked = {"requests": args.requests, "seeds": args.seeds}
    result.write("never_slower", asked | results, environment, args.json)


if __name__ == "__main__":
    main()
