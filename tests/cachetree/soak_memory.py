"""Does memory grow? A worker and a client run at 75 % of their budgets for half an hour.

    python tests/cachetree/soak_memory.py [--minutes 30] [--seed 1]

    client ──copy──► worker ──fetch──► client      every document differs; some share a beginning

At first both are filled once. Then entries live for a fixed time after their last use, and come at
a fixed rate. So three quarters of the worker's budget are in use, and are renewed all the time.
Some fetches are cancelled midway, and some ask for entries that are gone.

Resident memory, descriptors and threads of both processes are read every five seconds. The first
fifth of the time is warm-up. Then lines are fitted to each process's own memory, and to the memory
that it maps (arenas and files). The run ends in one JSON line. The exit status is 1 if a process's
own memory grows by 1 % of its resident memory per hour or more. It is also 1 if there are more
descriptors or threads at the end than after the warm-up.

Mapped memory is reported, not judged. A client maps the parts of its worker's arena that it reads,
so they count as resident in both processes, until it has read all of it. It cannot exceed the
arenas, and other tests check their budgets. Of a process's own memory, the minimum of each minute
counts: a document that is being stored takes a hundredth of the client's memory for a short time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path += [str(Path(__file__).parents[1] / name) for name in ("cachetree", "engine")]

from processes import Resident, num_descriptors, num_threads, resident
from profile_parts import HALF, family
from transport_parts import ask_status, content_of, pages_of

from cachetree import (
    Cache,
    CacheConfig,
    Deadline,
    FetchError,
    Kind,
    ModelId,
    PageHash,
    Plan,
    Span,
    Step,
    WorkerConfig,
)
from cachetree.memory.staging import Staging
from sglang_droidspeak.fleet.servers import WorkerSpec, free_port, running

FAMILY = family(num_layers=8, hidden_size=512, num_kv_heads=4, head_dim=64, **HALF)
E_LAYER = 2
MODEL = ModelId("sender")
PAGE_BYTES = FAMILY.num_layers * FAMILY.kv_page_bytes + FAMILY.e_page_bytes
BUDGET_BYTES = 256 << 20
SHARE = 0.72
NUM_PAGES = 24
NUM_SHARED = 8
NUM_BEGINNINGS = 8
TTL_S = 40.0
RATE = SHARE * BUDGET_BYTES / TTL_S / ((NUM_PAGES - NUM_SHARED) * PAGE_BYTES)
"""Documents per second."""
OLDEST = int(TTL_S * RATE / 8)
"""Number of latest documents that fetches choose from. They are fewer than the stored ones, because
a use lets a document live longer."""
NUM_FILLING = int(1.5 * BUDGET_BYTES / (NUM_PAGES * PAGE_BYTES))
"""Documents that are stored first. Memory that an arena has once lent counts as resident from then
on, and so does memory of the other process's arena once it was read. So both are filled before the
measurement."""
SAMPLE_S = 5.0
FLOOR_S = 60.0
"""Seconds over which the minimum of a process's own memory counts."""
LIMIT_PER_HOUR = 0.01
"""Largest growth of a process's own memory per hour, as a share of its resident memory."""

Sample = tuple[float, Resident]
"""Time of a sample, and the memory that was resident."""


def document(index: int) -> list[PageHash]:
    beginning = pages_of(NUM_SHARED, f"shared {index % NUM_BEGINNINGS} ")
    return beginning + pages_of(NUM_PAGES - NUM_SHARED, f"document {index} ")


def be_client(address: str, listen: str, seed: int) -> None:
    """Store and fetch without an end. Print the number of fetches that succeeded, and the number of
    others."""
    chance = random.Random(seed)
    config = CacheConfig(
        host_bytes=BUDGET_BYTES,
        staging_bytes=64 << 20,
        ttl_s=TTL_S,
        peers=(address,),
        worker=WorkerConfig(listen=listen),
    )
    counts = {"fetched": 0, "cancelled": 0, "gone": 0, "refused": 0}
    said_at_s = time.monotonic()
    with Cache(FAMILY, config) as cache:
        assert cache.wait_ready(20)
        for index in range(-NUM_FILLING, 0):
            put(cache, document(index))
            time.sleep(0.05)  # For the copy of it.
            take(cache, document(index), chance)
        fill_staging(cache, document(-1))
        begun_at_s, index = time.monotonic(), 0
        while True:
            put(cache, document(index))
            index += 1
            age = chance.choice((chance.randrange(2, OLDEST), 2 * int(TTL_S * RATE)))
            if index > age:
                counts[take(cache, document(index - age), chance)] += 1
            if time.monotonic() - said_at_s > SAMPLE_S:
                said_at_s = time.monotonic()
                print(json.dumps(counts), flush=True)
            time.sleep(max(0.0, begun_at_s + index / RATE - time.monotonic()))


def fill_staging(cache: Cache, pages: list[PageHash]) -> None:
    """Run as many fetches at once as the staging budget allows. Blocks of staging are kept, too."""
    stagings = []
    while (staging := begin(cache, pages)) is not None:
        stagings.append(staging)
    for staging in stagings:
        with staging:
            for step in staging.steps:
                staging.wait(step)


def put(cache: Cache, pages: list[PageHash]) -> None:
    kv = [joined(pages, Step(Kind.KV, layer)) for layer in range(FAMILY.num_layers)]
    assert cache.store(MODEL, None, pages, kv, {E_LAYER: joined(pages, Step(Kind.E, E_LAYER))})


def joined(pages: list[PageHash], step: Step) -> memoryview:
    return memoryview(b"".join(content_of(FAMILY, page, step) for page in pages))


def begin(cache: Cache, pages: list[PageHash]) -> Staging | None:
    """Begin a fetch. Raises IndexError if no worker has the pages."""
    places = [it.location for it in cache.match(pages) if it.location.startswith("tcp")]
    plan = Plan(
        sender=MODEL,
        receiver=ModelId("receiver"),
        location=places[0],
        pages=Span(0, NUM_PAGES),
        block=Span(E_LAYER, 4),
        num_layers=FAMILY.num_layers,
    )
    return cache.fetch(plan, pages, Deadline.after(5))


def take(cache: Cache, pages: list[PageHash], chance: random.Random) -> str:
    try:
        staging = begin(cache, pages)
    except IndexError:
        return "gone"
    if staging is None:
        return "refused"
    with staging:
        if chance.random() < 0.1:
            time.sleep(0.001)
            return "cancelled"
        try:
            for step in staging.steps:
                staging.wait(step)
                staged = b"".join(staging.views(step))
                assert staged == joined(pages, step), "other bytes than were stored"
        except FetchError:
            return "gone"
    return "fetched"


def growth_per_hour(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth of own and of mapped memory per hour by fitted lines, as shares of the resident
    memory."""
    whole = float(np.mean([sum(held) for _, held in samples]))
    minutes: dict[int, Sample] = {}
    for at_s, held in samples:
        minute = int(at_s / FLOOR_S)
        if minute not in minutes or held.own_bytes < minutes[minute][1].own_bytes:
            minutes[minute] = (at_s, held)
    own = [(at_s, held.own_bytes) for at_s, held in minutes.values()]
    mapped = [(at_s, held.mapped_bytes) for at_s, held in samples]
    return {"own": _slope(own) / whole, "mapped": _slope(mapped) / whole}


def _slope(points: Sequence[tuple[float, int]]) -> float:
    """Slope of a fitted line, in bytes per hour."""
    at_s, held = np.array(points, float).T
    return float(np.polyfit(at_s / 3600, held, 1)[0])


def soak(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    address, listen = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    cache = {"host_bytes": BUDGET_BYTES, "ttl_s": TTL_S, "keeps": [listen]}
    config = {
        "family": msgspec.to_builtins(FAMILY),
        "cache": {**cache, "worker": {"listen": address}},
    }
    command = [sys.executable, __file__, "--client", address, listen, "--seed", str(seed)]
    with running(WorkerSpec(config=config), folder=folder) as (worker,):
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            groups = {"worker": worker.pid, "client": client.pid}
            held: dict[str, list[Sample]] = {name: [] for name in groups}
            counted: list[dict[str, int]] = []
            used: list[float] = []
            begun_at_s = time.monotonic()
            while (at_s := time.monotonic() - begun_at_s) < 60 * minutes:
                line = client.stdout.readline()
                assert line, "the client has ended"
                if at_s < 60 * minutes / 5:
                    continue
                for name, group in groups.items():
                    held[name].append((at_s, resident(group)))
                counted.append(
                    {f"{name} descriptors": num_descriptors(it) for name, it in groups.items()}
                    | {f"{name} threads": num_threads(it) for name, it in groups.items()}
                )
                used.append(ask_status(address, timeout_s=5).num_bytes / BUDGET_BYTES)
            fetches = json.loads(line)
        finally:
            client.kill()
            client.wait()
    growth = {name: growth_per_hour(samples) for name, samples in held.items()}
    grown = {it: counted[-1][it] - counted[0][it] for it in counted[0]}
    return {
        "question": "memory of a worker and its client over time",
        "seed": seed,
        "minutes": minutes,
        "samples": len(used),
        "budget_used": [min(used), max(used)],
        "resident_mib": {
            name: [
                [round(part / 2**20, 1) for part in it]
                for _, it in samples[:: max(1, len(samples) // 12)]
            ]
            for name, samples in held.items()
        },
        "growth_per_hour": growth,
        "grown": grown,
        "fetches": fetches,
        "problems": [name for name, it in growth.items() if it["own"] >= LIMIT_PER_HOUR]
        + [name for name, it in grown.items() if it > 0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        be_client(*args.client, args.seed)
    print(f"soak: seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = soak(args.minutes, args.seed, Path(folder))
    print(json.dumps(result), flush=True)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
