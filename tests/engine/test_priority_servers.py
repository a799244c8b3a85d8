"""Priorities and reuse together: which requests wait for a fetch, and in which order they run.

One request runs at a time, so requests run in the order of their answers. The test itself holds
back and releases the KV for which a request waits, so no order depends on speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import requests
from engine_parts import CPU, ENV, Answer, answer, eventually, family_of, prompt
from forked import ServerSpec
from stalling import GatedWorker
from struck_parts import scraped

from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, running

pytestmark = pytest.mark.server

DOCUMENTS = [prompt(150 + 16 * i, seed=40 + i) for i in range(4)]
"""Prompts that the other model has read."""
PLAIN = [prompt(130 + 16 * i, seed=50 + i) for i in range(3)]
"""Prompts that no server has read."""
BLOCK = "1:3"
NEAR = 2e-4
"""Largest difference of the log-probabilities of two tokens that may change places in another
batch."""
MANY_TOKENS = 8000


@dataclass(frozen=True)
class Rig:
    server: Server
    gate: GatedWorker

    def ask(self, tokens: list[int], **options: Any) -> Answer:
        controls = {"block": BLOCK, "sender": self.gate.model} if tokens in DOCUMENTS else {}
        return answer(self.server, tokens, droidspeak=controls, **options)

    def alone(self, tokens: list[int], **options: Any) -> Answer:
        """Return the answer without other requests: over the fixed block, or of a full prefill."""
        self.gate.open()
        reply = self.ask(tokens, **options)
        self.gate.shut()
        assert reply.provenance["outcome"] == ("reused" if tokens in DOCUMENTS else "no_match")
        self.server.flush()
        return reply

    @property
    def load(self) -> tuple[int, int]:
        """Return the number of running and of waiting requests. Held requests are among the waiting
        ones."""
        (load,) = requests.get(f"{self.server.url}/v1/loads", timeout=10).json()["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    def abort(self, **target: Any) -> None:
        requests.post(
            f"{self.server.url}/abort_request", json=target, timeout=10
        ).raise_for_status()

    @contextmanager
    def asking(self, num_threads: int) -> Iterator[ThreadPoolExecutor]:
        """Open a pool of threads that send requests. If the body raises an error, no request
        continues to wait."""
        with ThreadPoolExecutor(num_threads) as pool:
            try:
                yield pool
            except BaseException:
                self.abort(rid="", abort_all=True)
                raise
            finally:
                self.gate.open()
        self.gate.shut()

    @contextmanager
    def busy(self, pool: ThreadPoolExecutor, num_waiting: int) -> Iterator[None]:
        """Let a request that cannot be displaced run alone during the body."""
        ended = pool.submit(
            answer, self.server, prompt(20, 1), max_new_tokens=MANY_TOKENS, priority=9, rid="busy"
        )
        eventually(lambda: self.load == (1, num_waiting))
        yield
        assert not ended.done()
        self.abort(rid="busy")
        ended.exception()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("priorities")
    config = shape("llama", layers=4, hidden=256, heads=4, kv_heads=2)
    (model,) = write_models(folder, config, ["model"], seed=5)
    with GatedWorker(family_of(model), "another", DOCUMENTS) as gate:
        server = ServerSpec(
            model=model,
            options=CPU
            | {
                "enable-metrics": True,
                "enable-priority-scheduling": True,
                "priority-scheduling-preemption-threshold": 0,
                "max-running-requests": 1,
            },
            droidspeak={
                "peers": [gate.address],
                "gate": "none",
                "host_gb": 0,
                "fetch_deadline_s": 60.0,
            },
        )
        with running(server, folder=folder / "logs", env=ENV) as (started,):
            rig = Rig(started, gate)
            eventually(lambda: is_known(rig))
            yield rig


def is_known(rig: Rig) -> bool:
    metrics = scraped(f"{rig.server.url}/metrics")
    return metrics.get(("cachetree:peer_ready", rig.gate.address)) == 1


def in_order(replies: dict[str, Future[Answer]]) -> list[str]:
    """Return the names of the requests in the order in which the server ended them, without the
    unended ones."""
    ended = {name: it.result() for name, it in replies.items() if it.done()}
    return sorted(ended, key=lambda name: ended[name].meta["request_finished_ts"])


def test_who_is_held_lets_others_by_and_goes_by_priority_once_fetched(rig):
    """The requests that wait for a fetch came first, and one of them has the highest priority of
    all."""
    wanted = {
        "held, 2": (DOCUMENTS[0], 2),
        "held, 7": (DOCUMENTS[1], 7),
        "held, 4": (DOCUMENTS[2], 4),
        "plain, 1": (PLAIN[0], 1),
        "plain, 5": (PLAIN[1], 5),
        "plain, 3": (PLAIN[2], 3),
    }
    alone = {name: rig.alone(tokens) for name, (tokens, _) in wanted.items()}
    replies: dict[str, Future[Answer]] = {}
    with rig.asking(len(wanted) + 1) as pool:
        with rig.busy(pool, num_waiting=0):
            for name, (tokens, priority) in wanted.items():
                replies[name] = pool.submit(rig.ask, tokens, priority=priority)
                eventually(lambda: rig.load == (1, len(replies)))
            eventually(lambda: rig.gate.num_held == 3)
        plain = [name for name in wanted if name.startswith("plain")]
        eventually(lambda: all(replies[name].done() for name in plain))
        assert in_order(replies) == ["plain, 5", "plain, 3", "plain, 1"]
        with rig.busy(pool, num_waiting=3):
            rig.gate.open()
            # What was asked for first has come first: the last one, which may displace the busy
            # one, speaks for all.
            rig.ask(DOCUMENTS[3], priority=10)
    assert in_order(replies)[len(plain) :] == ["held, 7", "held, 4", "held, 2"]
    for name, reply in replies.items():
        assert same(reply.result(), alone[name]), name
    rig.server.flush()


def same(first: Answer, second: Answer) -> bool:
    labels = [(it.provenance["outcome"], it.provenance["exact"]) for it in (first, second)]
    is_near = first.logprobs == pytest.approx(second.logprobs, abs=2e-4)
    return first.ids == second.ids and is_near and labels[0] == labels[1]


@pytest.mark.parametrize("tokens", [DOCUMENTS[0], PLAIN[0]], ids=["reused", "plain"])
def test_who_is_held_displaces_another_once_fetched_and_no_sooner(rig, tokens):
    """A displaced request gets its KV by fetch or computation, and continues as before."""
    alone = rig.alone(tokens, max_new_tokens=300, top_logprobs_num=2)
    top = alone.meta["output_top_logprobs"]
    gaps = [first[0] - second[0] for first, second in top]
    num_clear = next((i for i, gap in enumerate(gaps) if gap < NEAR), len(gaps))
    wanted = rig.alone(DOCUMENTS[1])
    controls = {"block": BLOCK, "sender": rig.gate.model} if tokens in DOCUMENTS else None
    with rig.asking(2) as pool:
        if tokens in DOCUMENTS:
            rig.gate.open()
        low = rig.server.replies(
            tokens,
            max_new_tokens=MANY_TOKENS,
            sampling_params={"ignore_eos": True},
            priority=1,
            droidspeak=controls,
        )
        next(low)
        rig.gate.shut()
        high = pool.submit(rig.ask, DOCUMENTS[1], priority=2)
        eventually(lambda: rig.gate.num_held == 1)
        first = next(low)
        seen = next(it for it in low if len(it["output_ids"]) > len(first["output_ids"]) + 20)
        assert seen["meta_info"]["num_retractions"] == 0
        assert not high.done()
        rig.gate.open()
        displaced = next(it for it in low if it["meta_info"]["num_retractions"])
        num_before = len(displaced["output_ids"])
        last = next(it for it in low if len(it["output_ids"]) > num_before + 8)
        assert same(high.result(), wanted)
        # It has no name of ours: two seconds after a stream was closed, SGLang aborts whoever has
        # its name then.
        rig.abort(rid="", abort_all=True)
        low.close()
    print(f"displaced after {num_before} of {num_clear} tokens without a tie")
    ids = last["output_ids"][:num_clear]
    assert ids == alone.ids[: len(ids)]
    eventually(lambda: rig.load == (0, 0))
    rig.server.flush()
