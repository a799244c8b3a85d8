"""How long a decoding request waits while another request's layers are recomputed or come late."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from engine_parts import CPU, ENV, family_of
from forked import ServerSpec
from stalling import StallingWorker

from benchmarks.random_adapters import write_adapter
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import Server, running

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.slow]

NUM_SHARED = 1536
BLOCK = "4:10"
STEP_TOKENS = 64
"""Number of tokens of a prompt that SGLang prefills in one step, beside the requests that
decode."""
LATE_SEED = 5
NUM_RUNS = 3
"""Number of runs. Noise makes a gap longer and never shorter, so the shortest one counts."""


STALLING = "stalling"
"""Name of the model of the worker that never sends the last layer."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[dict[str, Server]]:
    """Start one server with default limits and one with hardly any, each with a base and an
    adapter. Both read from a worker that stalls."""
    folder: Path = tmp_path_factory.mktemp("stall")
    (base,) = write_models(
        folder, shape("llama", layers=12, hidden=512, heads=8, kv_heads=8), ["base"]
    )
    options = CPU | {
        "lora-backend": "torch_native",
        "max-lora-rank": 8,
        "chunked-prefill-size": STEP_TOKENS,
        "enable-mixed-chunk": True,
        "max-total-tokens": 12288,
    }
    adapters = {"adapter": write_adapter(folder / "adapter", base, rank=8)}
    late = random_prompt(NUM_SHARED + 1, LATE_SEED)
    worker = StallingWorker(family_of(base), STALLING, late)
    droidspeak = {
        "gate": "none",
        "host_gb": 0,
        "capture_layers": [4],
        "peers": [worker.address],
        "fetch_deadline_s": 1.5,
        "peer_cooldown_s": 0.5,
    }
    limits = {"default": {}, "unlimited": {"max_stall_ms": 1e6}}
    specs = [
        ServerSpec(
            name=name, model=base, options=options, adapters=adapters, droidspeak=droidspeak | limit
        )
        for name, limit in limits.items()
    ]
    with worker, running(*specs, folder=folder / "logs", env=ENV) as started:
        yield dict(zip(limits, started, strict=True))


class Decoding:
    """A stream of tokens, with the time at which each one came."""

    def __init__(self, server: Server) -> None:
        self.token_s: list[float] = []
        self._server = server
        self._is_under_way = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        replies = self._server.replies(
            random_prompt(32, 7), max_new_tokens=400, sampling_params={"ignore_eos": True}
        )
        for _ in replies:
            self.token_s.append(time.monotonic())
            if len(self.token_s) == 10:
                self._is_under_way.set()

    def __enter__(self) -> Decoding:
        self._thread.start()
        assert self._is_under_way.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        requests.post(f"{self._server.url}/abort_request", json={"rid": "", "abort_all": True})
        self._thread.join()

    def longest_gap_ms(self, start_s: float, stop_s: float) -> float:
        inside = [it for it in self.token_s if start_s <= it <= stop_s]
        return 1e3 * max(after - before for before, after in itertools.pairwise(inside))


def stalled(server: Server, seed: int, **controls: str) -> tuple[float, dict]:
    """Return the longest wait for a token, in ms, while another request prefills what the base has
    read."""
    shared = random_prompt(NUM_SHARED, seed)
    server.generate(shared, max_new_tokens=1)
    return beside_decoding(
        server, [*shared, *random_prompt(20, seed + 1)], controls, lora_path="adapter"
    )


def beside_decoding(server, tokens, controls, **asked):
    """Return the longest wait for a token, in ms, while another request is served."""
    with Decoding(server) as decoding:
        started_s = time.monotonic()
        reply = server.generate(tokens, max_new_tokens=4, droidspeak=controls, **asked)
        gap_ms = decoding.longest_gap_ms(started_s, time.monotonic())
    (provenance,) = reply["meta_info"]["droidspeak"]
    return gap_ms, provenance


def test_decoding_waits_no_longer_than_twice_what_sglang_alone_has_it_wait(servers):
    cases = {
        "alone": (servers["default"], {"mode": "off"}),
        "default": (servers["default"], {"block": BLOCK}),
        "unlimited": (servers["unlimited"], {"block": BLOCK}),
    }
    gaps_ms: dict[str, list[float]] = {name: [] for name in cases}
    reused: dict[str, set[int]] = {name: set() for name in cases}
    for run in range(NUM_RUNS):
        for index, (name, (server, controls)) in enumerate(cases.items()):
            gap_ms, provenance = stalled(server, 100 * (1 + len(cases) * run + index), **controls)
            gaps_ms[name].append(gap_ms)
            reused[name].add(provenance["reused_tokens"])
    alone_ms, default_ms, unlimited_ms = (min(it) for it in gaps_ms.values())
    print(gaps_ms, reused)
    assert reused["alone"] == {0}
    assert reused["unlimited"] == {NUM_SHARED}
    (num_default,) = reused["default"]
    assert 0 < num_default < NUM_SHARED
    assert default_ms <= 2 * alone_ms, gaps_ms
    assert unlimited_ms > 3 * alone_ms, "there is nothing to limit"


def test_a_load_that_fails_has_decoding_wait_no_longer_than_twice_that(servers):
    """All layers but the last come at once, so the last one is expected within the recompute."""
    cases = {"alone": {"mode": "off"}, "fails": {"block": "1:3", "sender": STALLING}}
    tokens, server = random_prompt(NUM_SHARED + 1, LATE_SEED), servers["default"]
    gaps_ms: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(NUM_RUNS):
        for name, controls in cases.items():
            server.flush()
            gap_ms, provenance = beside_decoding(server, tokens, controls)
            gaps_ms[name].append(gap_ms)
            assert provenance["outcome"].startswith("fallback") == (name == "fails"), provenance
    print(gaps_ms)
    assert min(gaps_ms["fails"]) <= 2 * min(gaps_ms["alone"]), gaps_ms
