"""Faults at random between real servers, for minutes: no request may fail.

    python tests/engine/soak.py [--minutes 10] [--seed 1]

    author ──copy──► worker (memory, disk) ◄── fault proxy ◄── reader

Both engines run one model, so that reuse and full prefill must answer alike. The reader is asked
about documents that the worker has. Meanwhile frames are delayed, dropped, doubled, cut, flipped or
stalled, and connections are cut. The worker is stopped, or killed (once a minute at least) and
restarted, with shared memory in every other life. Afterwards the reader holds no more descriptors
and threads than before, and no memory of fetches. The run ends in one JSON line. The exit status is
1 if a request failed, had another answer, or was later than its deadline allows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests

sys.path += [str(Path(__file__).parents[1] / name) for name in ("..", "cachetree", "engine")]

from engine_parts import CPU, ENV, PAGE, Answer, Watcher, answer, prompt
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from forked import ServerSpec
from processes import num_descriptors, num_threads, resident_bytes
from shelf import Shelf

from cachetree import Location
from cachetree.checkpoint.identity import read_model_identity
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, free_port, running

NUM_DOCUMENTS = 12
NUM_TOKENS = 400
NUM_LAYERS = 6
BLOCKS = ("none", "2:4", "2:6")
DEADLINE_S = 2.0
MARGIN_S = 2.0
"""Margin for a machine with five processes on its processors."""
KILL_EVERY_S = 40.0
HARM_EVERY_S = (3.0, 9.0)


@dataclass
class Record:
    """Counts of events so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    harms: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def worker_config(model, address, author, disk, life):
    return {
        "family": {"model": str(model), "kv_dtype": "float32", "page_size": PAGE},
        "cache": {
            "host_bytes": 256 << 20,
            "disk_path": str(disk),
            "disk_bytes": 512 << 20,
            "keeps": [author],
            "worker": {"listen": address, "shared_memory": bool(life % 2), "max_bytes_per_s": 50e6},
        },
    }


class Chaos(threading.Thread):
    """A thread that harms the fleet until it has to end. It leaves everything working."""

    def __init__(self, shelf: Shelf, proxy: FaultProxy, seed: int, record: Record) -> None:
        super().__init__(name="chaos")
        self._shelf = shelf
        self._proxy = proxy
        self._random = random.Random(seed)
        self._record = record
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        killed_at_s = time.monotonic()
        while not self._over.wait(self._random.uniform(*HARM_EVERY_S)):
            is_due = time.monotonic() - killed_at_s > KILL_EVERY_S
            harm = (
                self._kill
                if is_due
                else self._random.choice((self._strike,) * 3 + (self._halt, self._cut))
            )
            if is_due:
                killed_at_s = time.monotonic()
            self._record.harms[harm()] += 1
        self._proxy.arm(None)
        self._proxy.cut()

    def _kill(self) -> str:
        self._shelf.kill()
        self._over.wait(self._random.uniform(0, 3))
        self._shelf.restart()
        return "kill"

    def _halt(self) -> str:
        pid = self._shelf.process.pid
        os.kill(pid, signal.SIGSTOP)
        self._over.wait(self._random.uniform(0.2, 4))
        os.kill(pid, signal.SIGCONT)
        return "stop and continue"

    def _cut(self) -> str:
        self._proxy.cut()
        return "cut"

    def _strike(self) -> str:
        fault = self._random.choice(list(Fault))
        towards = self._random.choice(list(Towards))
        via = self._random.choice((Via.ZMQ, Via.DATA))
        self._proxy.arm(Strike(fault, towards, self._random.randrange(60), via))
        return fault.name.lower()


def same(first: Answer, second: Answer) -> bool:
    near = zip(first.logprobs, second.logprobs, strict=True)
    return first.ids == second.ids and all(abs(one - other) < 2e-4 for one, other in near)


def ask(reader, tokens, alone, alone_s, controls, record):
    begun_at_s = time.monotonic()
    try:
        reader.flush()
        reply = answer(reader, tokens, droidspeak=controls, timeout_s=60)
    except requests.RequestException as exc:
        record.failures.append(f"{controls}: {exc}")
        return
    added_s = time.monotonic() - begun_at_s - alone_s
    record.outcomes[reply.provenance["outcome"]] += 1
    record.seconds.append(added_s)
    if not same(reply, alone):
        record.failures.append(f"{controls}: another answer, {reply.provenance}")
    if added_s > DEADLINE_S + MARGIN_S:
        record.failures.append(f"{controls}: {added_s:.2f} s more, {reply.provenance}")


def held(reader: Server) -> dict[str, int]:
    return {"descriptors": num_descriptors(reader.pid), "threads": num_threads(reader.pid)}


def settle(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


def soak(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
    (model,) = write_models(folder, config, ["both"], seed=5)
    model_id = read_model_identity(model).model_id
    documents = [prompt(NUM_TOKENS, seed=100 + index) for index in range(NUM_DOCUMENTS)]
    record = Record()
    chance = random.Random(seed)
    address, listen = (Location(f"tcp://127.0.0.1:{free_port()}") for _ in range(2))
    shelf = Shelf(partial(worker_config, model, address, listen, folder / "disk"), folder)
    with FaultProxy(address, seed=seed) as proxy:
        author = ServerSpec(
            model=model,
            name="author",
            options=CPU,
            droidspeak={"listen": listen, "capture_layers": [2], "host_gb": 0.25},
        )
        reader = ServerSpec(
            model=model,
            name="reader",
            options=CPU,
            droidspeak={
                "peers": [proxy.address],
                "gate": "none",
                "host_gb": 0,
                "fetch_deadline_s": DEADLINE_S,
            },
        )
        try:
            with running(author, reader, folder=folder, env=ENV) as (a, r):
                watcher = Watcher(model, [address])
                for document in documents:
                    answer(a, document, max_new_tokens=1)
                    watcher.wait_for(document, model)
                watcher.close()
                alone, alone_s = [], []
                for document in documents:
                    r.flush()
                    begun_at_s = time.monotonic()
                    alone.append(answer(r, document, droidspeak={"mode": "off"}))
                    alone_s.append(time.monotonic() - begun_at_s)
                for document in documents:
                    r.flush()
                    answer(r, document, droidspeak={"block": "none"})
                before, resident = held(r), resident_bytes(r.pid)
                chaos = Chaos(shelf, proxy, seed, record)
                chaos.start()
                ends_at_s = time.monotonic() + 60 * minutes
                while time.monotonic() < ends_at_s:
                    index = chance.randrange(NUM_DOCUMENTS)
                    # By name, because nothing is recomputed of one's own model's otherwise.
                    controls = {"block": chance.choice(BLOCKS), "sender": model_id}
                    ask(r, documents[index], alone[index], alone_s[index], controls, record)
                chaos.stop()
                if not settle(lambda: all(held(r)[it] <= before[it] for it in before)):
                    record.failures.append(f"holds {held(r)} after {before}")
                after, grown = held(r), resident_bytes(r.pid) / resident
        finally:
            shelf.kill()
    seconds = sorted(record.seconds)
    return {
        "question": "requests that failed under faults",
        "seed": seed,
        "minutes": minutes,
        "requests": len(seconds),
        "failed": len(record.failures),
        "failures": record.failures[:10],
        "outcomes": dict(record.outcomes),
        "harms": dict(record.harms),
        "added_s": {"median": statistics.median(seconds), "max": seconds[-1]},
        "reader_before": before,
        "reader_after": after,
        "reader_memory_grew_to": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = parser.parse_args()
    print(f"soak: seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = soak(args.minutes, args.seed, Path(folder))
    print(json.dumps(report), flush=True)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
