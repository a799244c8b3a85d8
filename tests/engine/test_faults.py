"""After every fault the answer equals the full prefill's, in bounded time, and other requests
continue."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import server_parts
from engine_parts import (
    CPU,
    PAGE,
    Answer,
    answer,
    eventually,
    family_of,
    page_hashes,
    prompt,
    whole_pages,
)
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from otlp_collector import Collected, Collector, collecting
from server_parts import same, servers
from shelf import Shelf
from stalling import StallingWorker
from struck_parts import scraped
from transport_parts import ask_status

from cachetree.cache import Cache
from cachetree.checkpoint.family import Family
from cachetree.checkpoint.identity import read_model_identity
from cachetree.config import CacheConfig
from cachetree.ids import Location, Span
from cachetree.transport import WorkerConfig
from profiles.random_models import shape, write_models
from sglang_droidspeak.cli import main
from sglang_droidspeak.fleet.servers import Server, free_port

pytestmark = [pytest.mark.server, pytest.mark.alone]

LINK_MB_S = 2.0
DEADLINE_S = 3.0
BYTES_PER_TOKEN = 6 * 2 * 2 * 64 * 4
"""Bytes of one token: KV of six layers with two heads of 64, in float32."""


@dataclass
class Silent:
    """A worker of its own that has the receiver's KV of one prompt, and a way in which it stops
    answering."""

    tokens: list[int]
    shelf: Shelf
    proxy: FaultProxy
    """The proxy between worker and reader."""

    @contextmanager
    def by(self, cause: str) -> Iterator[None]:
        """Let the worker stop answering inside the block."""
        if cause == "black hole":
            self.proxy.arm(Strike(Fault.STALL, Towards.PEER, 0, Via.DATA))
            yield
            assert self.proxy.has_struck
            self.proxy.arm(None)
            self.proxy.cut()
            return
        group = os.getpgid(self.shelf.process.pid)
        os.killpg(group, signal.SIGSTOP)
        if cause == "stopped":
            try:
                yield
            finally:
                os.killpg(group, signal.SIGCONT)
            return
        end = threading.Timer(0.2, os.killpg, (group, signal.SIGKILL))
        end.start()
        yield
        end.join()
        self.shelf.kill()
        self.shelf.restart()


@contextmanager
def silent_in(folder: Path, family: Family, model: Path, tokens: list[int]) -> Iterator[Silent]:
    address, authors = (Location(f"tcp://127.0.0.1:{free_port()}") for _ in range(2))
    outcomes = {
        "family": {"model": str(model), "kv_dtype": "float32", "page_size": PAGE},
        "cache": {
            "host_bytes": 64 << 20,
            "disk_path": str(folder / "disk"),
            "disk_bytes": 64 << 20,
            "keeps": [authors],
            "worker": {"listen": address, "shared_memory": False},
        },
    }
    shelf = Shelf(lambda _life: outcomes, folder)
    try:
        eventually(shelf.process.is_ready)
        pages = page_hashes(tokens)
        kv = [memoryview(bytes(len(pages) * family.kv_page_bytes))] * family.num_layers
        author = CacheConfig(peers=(address,), worker=WorkerConfig(listen=authors))
        with Cache(family, author) as cache, FaultProxy(address, seed=1) as proxy:
            assert cache.wait_ready(20)
            cache.store(read_model_identity(model).model_id, None, pages, kv, {})
            eventually(
                lambda: (
                    max(
                        (it.num_pages for it in cache.match(pages) if it.location == address),
                        default=0,
                    )
                    == len(pages)
                )
            )
            yield Silent(tokens, shelf, proxy)
    finally:
        shelf.kill()


@dataclass(frozen=True)
class Pair(server_parts.Pair):
    stalling: StallingWorker
    replica: StallingWorker
    """A worker that offers the receiver's own KV."""
    silent: Silent
    collector: Collector

    def spans(self, reply: Answer) -> list[Collected]:
        """Return the spans of the reply's trace, so far."""
        spans, rid = list(self.collector.spans), reply.meta["id"]
        roots = {it.trace_id for it in spans if it.attributes.get("rid") == rid}
        return [it for it in spans if it.trace_id in roots]

    def trace(self, reply: Answer, *names: str) -> list[Collected]:
        """Return one span for each of these names, once all of them and the root have arrived."""
        eventually(lambda: set(names) <= {it.name for it in self.spans(reply)})
        by_name = {name: [it for it in self.spans(reply) if it.name == name] for name in names}
        assert all(len(spans) == 1 for spans in by_name.values()), by_name
        return [spans[0] for spans in by_name.values()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faults")
    config = shape("llama", layers=6, hidden=256, heads=4, kv_heads=2)
    models = write_models(folder, config, ["s", "r"], seed=5)
    family, own = family_of(models[1]), read_model_identity(models[1]).model_id
    stalling = StallingWorker(family, "stalling", prompt(500, seed=77))
    replica = StallingWorker(family, own, prompt(500, seed=78))
    (folder / "silent").mkdir()
    with (
        collecting() as collector,
        silent_in(folder / "silent", family, models[1], prompt(700, seed=79)) as silent,
        stalling,
        replica,
    ):
        address = f"tcp://127.0.0.1:{free_port()}"
        traced = {"enable-trace": True, "otlp-traces-endpoint": collector.endpoint}
        sends = {"listen": address, "capture_layers": [1, 2, 3], "max_link_mb_s": LINK_MB_S}
        reads = {
            "peers": [address, stalling.address, replica.address, silent.proxy.address],
            "fetch_deadline_s": DEADLINE_S,
            "peer_cooldown_s": 0.5,
            # Room for one long fetch: a second one would not fit if the first had leaked.
            "staging_gb": 1.65 * 700 * BYTES_PER_TOKEN / (1 << 30),
        }
        reader = {"enable-metrics": True}
        with servers(folder, models, sends, reads, {**CPU, **traced}, reader) as team:
            beside = stalling, replica, silent, collector
            yield Pair(team.sender, team.receiver, address, team.watcher, *beside)


def test_tenants_never_meet(pair):
    tokens = prompt(160, seed=1)
    pair.send(tokens, salt="alice")
    outcomes = {}
    for salt in ("bob", None, "alice"):
        reply = answer(pair.receiver, tokens, cache_salt=salt, droidspeak={"block": "none"})
        outcomes[salt] = reply.provenance["outcome"]
    assert outcomes == {"bob": "no_match", None: "no_match", "alice": "reused"}


def test_bad_controls_cost_the_reuse_only(pair):
    tokens = prompt(120, seed=2)
    alone = pair.alone(tokens)
    for controls in ({"block": "5:2"}, {"block": "middle"}, {"mode": "fast"}, {"blok": "1:2"}):
        pair.receiver.flush()
        reply = answer(pair.receiver, tokens, droidspeak=controls)
        assert reply.provenance["outcome"] == "bad_controls"
        assert next(iter(controls)) in reply.provenance["detail"]
        assert same(reply, alone)
    params = {"max_new_tokens": 1, "custom_params": 5}
    odd = Answer(pair.receiver.post("/generate", input_ids=tokens, sampling_params=params))
    assert odd.provenance["outcome"] == "bad_controls"
    assert "Expected `object`, got `int`" in odd.provenance["detail"]


def test_deadline(pair):
    num_tokens = int(DEADLINE_S * 1.6 * LINK_MB_S * 1e6 / BYTES_PER_TOKEN) // PAGE * PAGE + 1
    tokens = prompt(num_tokens, seed=3)
    alone = pair.alone(tokens)
    pair.send(tokens)
    reply = answer(pair.receiver, tokens, droidspeak={"block": "2:4"})
    assert reply.provenance["outcome"] == "fallback: DeadlineExceeded"
    assert reply.provenance["queued_ms"] <= 1000 * (DEADLINE_S + alone.meta["e2e_latency"])
    assert same(reply, alone)
    (given_up,) = pair.trace(reply, "droidspeak.fallback")
    assert given_up.attributes == {"droidspeak.cause": "DeadlineExceeded"}


def test_last_layer_never_comes_after_admission(pair):
    """The layer is predicted to arrive during the recompute. It does not, so the prefix is
    prefilled."""
    alone = pair.alone(pair.stalling.tokens)
    for _ in range(3):
        pair.receiver.flush()
        reply = answer(
            pair.receiver,
            pair.stalling.tokens,
            droidspeak={"block": "1:5", "sender": pair.stalling.model},
        )
        assert reply.provenance["outcome"] == "fallback: ForwardWaitExceeded"
        assert reply.provenance["fetched_bytes"], "it was admitted with the load"
        assert reply.meta["cached_tokens"] == 0
        assert not any((reply.meta["cached_tokens_details"] or {}).values())
        assert reply.provenance["exact"]
        assert same(reply, alone)
    (prefill,) = pair.trace(reply, "droidspeak.fallback")
    assert prefill.attributes == {"droidspeak.cause": "ForwardWaitExceeded"}
    assert prefill.stop_ns > prefill.start_ns


def test_a_link_that_is_slower_than_a_prefill_is_given_up(pair):
    """The link is given up well before the deadline, unless a request names the block."""
    alone = pair.alone(pair.replica.tokens)
    reply = answer(pair.receiver, pair.replica.tokens)
    assert reply.provenance["outcome"] == "fallback: SlowLink"
    assert reply.provenance["queued_ms"] < 1000 * DEADLINE_S
    assert same(reply, alone)


@pytest.mark.parametrize("cause", ["stopped", "black hole", "killed"])
def test_a_worker_that_does_not_answer_costs_no_more_than_reuse_saves(pair, cause):
    """The cost is at most a full prefill, which is all that reuse could save. After some such
    fetches there is no cost."""
    tokens = pair.silent.tokens
    by_name = {"block": "none", "sender": read_model_identity(pair.models["receiver"]).model_id}
    alone = [pair.alone(tokens) for _ in range(3)]

    def is_worth_it() -> bool:
        """Whether the server chooses reuse by itself. It measures the link by its own reads."""
        pair.receiver.flush()
        answer(pair.receiver, tokens, droidspeak=by_name)
        return pair.ask(tokens).provenance["outcome"] == "reused"

    eventually(is_worth_it)
    with pair.silent.by(cause):
        replies = []
        for _ in range(3):  # In turn: what else the machine does slows down both.
            replies.append(pair.ask(tokens))
            alone.append(pair.alone(tokens))
        if cause != "black hole":  # Which lasts as long as the connection that is given up.
            last = pair.ask(tokens).provenance
            assert last["outcome"] in ("no_match", "slower") and last["queued_ms"] == 0, last
    alone_s = [it.meta["e2e_latency"] for it in alone]
    outcomes = [(it.provenance["outcome"], it.provenance["queued_ms"]) for it in replies]
    assert outcomes[0][0].startswith("fallback"), outcomes
    assert max(queued_ms for _, queued_ms in outcomes) <= 1.05 * 1000 * max(alone_s), outcomes
    waited = [it for it in replies if it.provenance["outcome"].startswith("fallback")]
    late_s = min(it.meta["e2e_latency"] for it in waited)
    assert late_s <= 1.05 * 2 * max(alone_s), (late_s, alone_s)
    prefilled = [it for it in replies if it.provenance["outcome"] != "reused"]
    assert all(same(it, alone[0]) for it in prefilled)
    assert len(prefilled) == len(replies) or cause == "black hole"


def abort(server: Server, **target: Any) -> None:
    requests.post(f"{server.url}/abort_request", json=target, timeout=10).raise_for_status()


class Sending:
    """Frames that the sender sends from now on."""

    def __init__(self, pair: Pair) -> None:
        self._address = pair.address
        self._before = ask_status(self._address, timeout_s=10)

    def wait_for(self, *, num_bytes: int = 0, num_fetches: int = 0) -> None:
        """Wait until this many bytes, or the last bytes of this many fetches, have been sent."""

        def has_sent() -> bool:
            before, now = self._before, ask_status(self._address, timeout_s=10)
            num_ended = now.fetches_by_outcome.get("ok", 0) - before.fetches_by_outcome.get("ok", 0)
            return (
                now.num_sent_bytes - before.num_sent_bytes >= num_bytes and num_ended >= num_fetches
            )

        eventually(has_sent)


def test_abort_while_the_fetch_runs(pair):
    """The test aborts often enough to show a leak of staging, slots or leases."""
    tokens = prompt(600, seed=4)
    pair.send(tokens)
    for attempt in range(4):
        rid, sending = f"aborted-{attempt}", Sending(pair)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(answer, pair.receiver, tokens, droidspeak={"block": "2:4"}, rid=rid)
            sending.wait_for(num_bytes=1)
            abort(pair.receiver, rid=rid)
            reply.exception()

    def reused() -> Answer | None:
        """Wait until a request reuses. Bytes that were sent for aborted requests may delay the
        first fetch."""
        pair.receiver.flush()
        reply = answer(pair.receiver, tokens, droidspeak={"block": "2:4"})
        return reply if reply.provenance["outcome"] == "reused" else None

    eventually(reused).assert_equals(pair.expected(tokens, Span(2, 4)))


def test_others_decode_while_a_fetch_runs(pair):
    tokens = prompt(600, seed=5)
    pair.send(tokens)
    sending = Sending(pair)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answer, pair.receiver, tokens, droidspeak={"block": "2:4"})
        sending.wait_for(num_bytes=1)
        started_s = time.monotonic()
        quick = answer(pair.receiver, prompt(40, seed=6), max_new_tokens=4)
        quick_s = time.monotonic() - started_s
        assert not slow.done()
        assert slow.result().provenance["outcome"] == "reused"
    assert quick.provenance["outcome"] == "no_match"
    assert quick_s < slow.result().provenance["fetch_ms"] / 1000


def test_family_is_compared_at_the_handshake(pair):
    family = family_of(pair.models["receiver"])
    dtypes = (("model_dtype", "bfloat16"), ("kv_dtype", "bfloat16"))
    for field, value in (("page_size", 32), *dtypes, ("rope", "{}")):
        other = msgspec.structs.replace(family, **{field: value})
        cache = Cache(other, CacheConfig(peers=(pair.address,), serves=False))
        try:
            (peer,) = eventually(
                lambda cache=cache: [p for p in cache.status().peers if p.state == "refused"]
            )
            assert field in peer.error
        finally:
            cache.close()


def test_metrics(pair):
    """Each metric rises by the values that the request was told."""
    tokens, metrics = prompt(160, seed=10), f"{pair.receiver.url}/metrics"
    pair.send(tokens)
    before = scraped(metrics)
    provenance = answer(pair.receiver, tokens, droidspeak={"block": "2:4"}).provenance
    assert provenance["outcome"] == "reused"
    assert provenance["fetched_bytes"] > 0

    def rose(name: str, *labels: str) -> float:
        return scraped(metrics).get((name, *labels), 0.0) - before.get((name, *labels), 0.0)

    assert rose("droidspeak:requests_total", "reused") == 1
    assert rose("droidspeak:approximate_requests_total") == 1
    assert provenance["exact"] is False
    num_reused = rose("droidspeak:reused_tokens_total", "approximate")
    assert num_reused == provenance["reused_tokens"] == whole_pages(160)
    assert rose("droidspeak:fetched_bytes_total") == provenance["fetched_bytes"]
    assert rose("droidspeak:queued_seconds_count") == 1
    # As it was told, in milliseconds with three decimals.
    assert 1e3 * rose("droidspeak:queued_seconds_sum") == pytest.approx(
        provenance["queued_ms"], abs=1e-3
    )
    assert scraped(metrics)["cachetree:peer_ready", pair.address] == 1


def test_a_request_is_told_in_its_trace(pair):
    """The trace includes the sender's work for the request."""
    tokens = prompt(160, seed=11)
    pair.send(tokens)
    reply = answer(pair.receiver, tokens, droidspeak={"block": "2:4"})
    provenance = reply.provenance
    names = ["match", "fetch_e", "fetch_kv", "wait", "recompute", "load"]
    spans = pair.trace(reply, "cachetree.serve", *(f"droidspeak.{name}" for name in names))
    serve, match, e, kv, wait, recompute, load = spans
    assert (e.stop_ns, e.attributes["droidspeak.layers"]) == (kv.start_ns, 1)
    assert kv.attributes["droidspeak.layers"] == provenance["loaded_layers"]
    fetched = [it.attributes["droidspeak.bytes"] for it in (e, kv)]
    assert sum(fetched) == serve.attributes["cachetree.bytes"] == provenance["fetched_bytes"]
    assert not serve.error
    # SGLang compares its clocks anew with every request; these two were told earlier, or elsewhere.
    slack_ns = 10_000_000_000
    assert abs(e.start_ns - serve.start_ns) < slack_ns
    assert abs(match.stop_ns - wait.start_ns) < slack_ns
    assert wait.start_ns <= wait.stop_ns <= recompute.start_ns
    assert recompute.attributes["droidspeak.layers"] == provenance["recomputed_layers"] == 2
    assert load.start_ns <= load.stop_ns
    assert match.attributes["droidspeak.sender"] == provenance["sender"]
    assert match.attributes["droidspeak.block"] == "[2, 4)"
    for span, name in ((recompute, "recompute_ms"), (kv, "fetch_ms")):
        begun_ns = e.start_ns if span is kv else span.start_ns
        assert (span.stop_ns - begun_ns) / 1e6 == pytest.approx(provenance[name], abs=2)
    outcome = "droidspeak.outcome"
    eventually(lambda: any(outcome in it.attributes for it in pair.spans(reply)))
    (scheduler,) = (it for it in pair.spans(reply) if outcome in it.attributes)
    assert scheduler.attributes[outcome] == provenance["outcome"] == "reused"


def test_sender_stalls(pair):
    """The sender is stopped for a while at different moments. The answer is exact, whether it was
    reused or prefilled."""
    tokens = prompt(700, seed=7)
    alone = pair.alone(tokens)
    pair.send(tokens)
    block = Span(1, 6)
    expected = pair.expected(tokens, block)
    scheduler = os.getpgid(pair.sender.pid)
    outcomes = set()
    num_bytes = 2 * whole_pages(700) * BYTES_PER_TOKEN // 6
    """Bytes of KV of one layer, and of E, which is equally large."""
    for share in (0.0, 0.25, 0.5, 0.75):
        eventually(lambda: is_offered(pair, tokens))
        sending = Sending(pair)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(answer, pair.receiver, tokens, droidspeak={"block": "1:6"})
            sending.wait_for(num_bytes=1 + int(share * num_bytes))
            os.killpg(scheduler, signal.SIGSTOP)
            try:
                result = reply.result(timeout=DEADLINE_S + 10)
            finally:
                os.killpg(scheduler, signal.SIGCONT)
        outcome = result.provenance["outcome"]
        outcomes.add(outcome.split(":")[0])
        if outcome == "reused":
            result.assert_equals(expected)
        else:
            assert same(result, alone)
    assert "fallback" in outcomes
    eventually(lambda: pair.watcher.num_pages(tokens, pair.models["sender"]) == 700 // PAGE, 60)


def is_offered(pair: Pair, tokens: list[int]) -> bool:
    """Whether the receiver, which left the sender alone after its stalls, asks the sender again."""
    pair.receiver.flush()
    reply = answer(pair.receiver, tokens[:160], droidspeak={"block": "2:4"})
    pair.receiver.flush()
    return reply.provenance["outcome"] == "reused"


def test_a_server_tells_how_its_peers_are_doing(pair, capsys):
    eventually(lambda: main(["peers", pair.receiver.url]) == 0)
    assert [pair.address, "ready"] in [
        line.split()[:2] for line in capsys.readouterr().out.splitlines()
    ]


def test_sender_killed_in_mid_stream(pair):
    """The fetch waits for the sender. This test is the last, because the sender does not come
    back."""
    tokens = prompt(600, seed=8)
    alone = pair.alone(tokens)
    pair.send(tokens)
    eventually(lambda: is_offered(pair, tokens))
    sending = Sending(pair)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(answer, pair.receiver, tokens, droidspeak={"block": "2:4"})
        sending.wait_for(num_bytes=1)
        pair.sender.kill()
        result = reply.result(timeout=30)
    assert result.provenance["outcome"].startswith("fallback")
    assert result.provenance["queued_ms"] <= 1000 * (DEADLINE_S + alone.meta["e2e_latency"])
    assert same(result, alone)
    again = answer(pair.receiver, prompt(200, seed=9))
    assert again.provenance["outcome"] == "no_match"
