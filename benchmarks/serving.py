"""How much slower does a server decode while others fetch from its cache?

    python -m benchmarks.serving [--windows 8] [--mb-s 100 400 0]

A server of a randomly initialised model of 12 layers × 768 decodes one long answer. Windows of one
second alternate. In every second window, a process fetches a document of 2,000 tokens (147 MB) from
the server's cache again and again. It does so at the stated rate (0: as fast as possible). The time
between two tokens is one step of the scheduler thread. The cache's threads lengthen the step
through the interpreter's lock, the processor's caches and, if they run there, its core. The goal is
at most 2 %.

The ratio compares the means of neighbouring windows: at the lower rates a fetch is a burst of a
tenth of a second, which a median would not see. The server computes with one thread on the first
core. The reader runs on the last core: a reader on another machine would not take the scheduler's
core either. The system chooses the cores of the server's other threads. The ratio includes the cost
of moving so many bytes on this machine. First the answer is compared with the same server's answer
while nothing is fetched.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks import result
from benchmarks.random_servers import BLOCK, ENV, PAGE, family_of, write_random
from benchmarks.relay import fetched
from cachetree import Cache, CacheConfig, PeerConfig
from cachetree.tree import page_hashes
from profiles.random_models import random_prompt
from sglang_droidspeak.fleet.client import ask_server
from sglang_droidspeak.fleet.servers import Server, ServerSpec, free_port, running

DOCUMENT = random_prompt(2000, seed=1)
QUESTION = random_prompt(64, seed=2)
WAYS = ("in place", "over TCP")
WINDOW_S = 1.0


class Fetcher:
    """A process that fetches the document again and again."""

    def __init__(self, address: str, model: Path, way: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._rate, self._num_bytes = spawning.RawValue("d", -1), spawning.RawValue("q", 0)
        is_ready = spawning.Event()
        args = (address, model, way, is_ready, self._rate, self._num_bytes)
        self._process = spawning.Process(target=_fetch_for_ever, args=args, daemon=True)
        self._process.start()
        assert is_ready.wait(120), "the document was not found"

    def at(self, rate: float) -> int:
        """Set the rate in bytes per second (0: as fast as possible, -1: no fetches). Return the
        bytes fetched so far."""
        self._rate.value = rate
        return self._num_bytes.value

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _fetch_for_ever(
    address: str, model: Path, way: str, is_ready: Any, rate: Any, num_bytes: Any
) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pages = page_hashes(DOCUMENT, PAGE)
    peer = PeerConfig(shared_memory=way == "in place")
    config = CacheConfig(peers=(address,), serves=False, peer=peer)
    with Cache(family_of(model), config) as cache:
        while not any(it.num_pages == len(pages) for it in cache.match(pages)):
            time.sleep(0.02)
        is_ready.set()
        while True:
            if rate.value < 0:
                time.sleep(0.005)
                continue
            begun_at_s = time.perf_counter()
            with fetched(cache, pages) as (_, staging):
                moved = staging.num_bytes
            num_bytes.value += moved
            while (now := rate.value) > 0 and time.perf_counter() - begun_at_s < moved / now:
                time.sleep(0.002)


@dataclass
class Answer:
    """One streamed answer: its text, and the time of each token."""

    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    is_over: bool = False

    def read(self, server: Server, num_tokens: int) -> None:
        replies = server.replies(
            QUESTION,
            max_new_tokens=num_tokens,
            timeout_s=600,
            sampling_params={"ignore_eos": True},
        )
        for reply in replies:
            self.arrivals_s.append(time.perf_counter())
            self.text = reply["text"]
        self.is_over = True

    def steps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Milliseconds between each two successive tokens that arrived within the window."""
        times = [at for at in self.arrivals_s if begin_s <= at < end_s]
        return [1000 * (after - before) for before, after in pairwise(times)]


def measure(
    server: Server, fetcher: Fetcher, rate: float, num_windows: int, alone: str
) -> dict[str, Any]:
    answer = Answer()
    reader = threading.Thread(target=answer.read, args=(server, 8000), daemon=True)
    reader.start()
    while len(answer.arrivals_s) < 20:
        time.sleep(0.01)
    means: dict[bool, list[float]] = {False: [], True: []}
    moved = busy_s = 0.0
    for index in range(2 * num_windows):
        is_on = bool(index % 2)
        before = fetcher.at(rate if is_on else -1)
        begin_s = time.perf_counter()
        time.sleep(WINDOW_S)
        end_s = time.perf_counter()
        moved += (fetcher.at(-1) - before) if is_on else 0
        busy_s += (end_s - begin_s) if is_on else 0
        steps = answer.steps_ms(begin_s, end_s)
        if answer.is_over or len(steps) < 5:
            break
        means[is_on].append(statistics.mean(steps))
    ask_server("POST", f"{server.url}/abort_request", json={"abort_all": True}, timeout=10)
    reader.join()
    assert moved, "nothing was fetched meanwhile"
    num_equal = min(len(alone), len(answer.text))
    assert answer.text[:num_equal] == alone[:num_equal], "serving must not change an answer"
    ratios = [on / off for off, on in zip(means[False], means[True], strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "asked_mb_s": rate / 1e6,
        "moved_mb_s": moved / busy_s / 1e6,
        "step_ms": statistics.median(means[False]),
        "ratio": middle,
        "p25": low,
        "p75": high,
        "windows": len(ratios),
    }


def keep_scheduler(server: Server) -> None:
    """Have the scheduler's thread compute on the first core."""
    processes = psutil.Process(server.pid).children(recursive=True)
    (scheduler,) = (it.pid for it in processes if it.cmdline()[:1] == ["sglang::scheduler"])
    os.sched_setaffinity(scheduler, {min(os.sched_getaffinity(0))})


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--mb-s", type=float, nargs="*", default=[100, 400, 0])
    args = parser.parse_args()
    environment = result.here()
    address = f"tcp://127.0.0.1:{free_port()}"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (model,) = write_random(Path(name), ["model"])
        spec = ServerSpec(
            model=model,
            options={"dtype": "float32", "device": "cpu", "max-total-tokens": 16384},
            droidspeak={"listen": address, "host_gb": 1, "capture_layers": [BLOCK.start]},
        )
        with running(spec, env=ENV) as (server,):
            keep_scheduler(server)
            server.generate(DOCUMENT, max_new_tokens=1)
            alone = Answer()
            alone.read(server, 300)
            for way in WAYS:
                with closing(Fetcher(address, model, way)) as fetcher:
                    for rate in args.mb_s:
                        row = measure(server, fetcher, 1e6 * rate, args.windows, alone.text)
                        rows.append({"path": way, **row})
    result.write("serving", {"rows": rows}, environment, args.json)


if __name__ == "__main__":
    main()
