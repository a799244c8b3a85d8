"""A follower of SGLang's events always knows which pages this server keeps in host memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import tree_parts
import zmq
from engine_parts import CPU, ENV, PAGE, answer, eventually, page_hashes, prompt
from forked import ServerSpec
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
    ZmqEventPublisher,
)
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from standins import request_of, sglang_tree

from cachetree import LOCAL, Cache, CacheConfig, Deadline, Location, ModelId, PageHash, Part
from cachetree.transport import ask, verbs
from cachetree.tree import join_hashes
from profiles.random_models import shape, write_models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.fleet.servers import free_port, running
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.store import events as store_events
from sglang_droidspeak.store.events import HostEvents
from sglang_droidspeak.store.insertions import EventTokens, Insertions, Offload

FAMILY = msgspec.structs.replace(tree_parts.FAMILY, page_size=PAGE)
MODEL = ModelId("0" * 32)
PAGE_BYTES = FAMILY.num_layers * FAMILY.kv_page_bytes
ADAPTER = LoRARef(lora_id="ab" * 16, lora_name="sql", lora_path="/sql")
HOST = StorageMedium.CPU.value


class Index:
    """An index as a follower keeps it: for each medium and block, the tokens of the prompt up to
    the block's end."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.rcvtimeo = 20_000
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.raw: list[dict[str, Any]] = []
        self.num_batches = 0
        self.num_cleared = 0
        self.tiers: dict[str, dict[int, tuple[int, ...]]] = {it.value: {} for it in StorageMedium}

    def receive(self) -> None:
        _topic, number, payload = self._socket.recv_multipart()
        assert int.from_bytes(number, "big") >= self.num_batches
        self.num_batches = int.from_bytes(number, "big") + 1
        self.apply(payload)

    def catch_up(self) -> None:
        while self._socket.poll(100):
            self.receive()

    def apply(self, payload: bytes) -> None:
        self.raw += msgspec.msgpack.decode(payload)[1]
        for event in self._decoder.decode(payload).events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.tiers[event.medium][block]
                case AllBlocksCleared():
                    self.num_cleared += 1

    def _store(self, event: BlockStored) -> None:
        tier = self.tiers[event.medium or "GPU"]
        path = () if event.parent_block_hash is None else tier[event.parent_block_hash]
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for number, block in enumerate(event.block_hashes):
            start = number * event.block_size
            path += tuple(event.token_ids[start : start + event.block_size])
            tier[block] = path

    @property
    def there(self) -> set[tuple[int, ...]]:
        return {*self.tiers[HOST].values()}

    def close(self) -> None:
        self._socket.close(linger=0)


class Keeper:
    """A cache, with the events about entries that an offloader stores in it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.offloader = SimpleNamespace(storing=None)
        self.metrics = Metrics(enabled=False)
        adapters = {ADAPTER.lora_id: ADAPTER}
        self.events = HostEvents(cache, self.offloader, adapters, self.metrics)  # type: ignore[arg-type]

    def store(self, tokens, names, model=MODEL):
        pages = page_hashes(tokens)
        slots = torch.zeros(0)
        self.offloader.storing = Offload(
            model=model, before=(), pages=pages, slots=slots, ready=(), event_tokens=names
        )
        self.fill(pages, model)
        self.offloader.storing = None

    def fill(self, pages: Sequence[PageHash], model: ModelId = MODEL) -> None:
        reservation = self.cache.tree.reserve(model, None, pages)
        assert reservation is not None
        reservation.commit()


def test_e_that_comes_and_goes_is_no_event(keeper):
    tokens = list(range(2 * PAGE))
    keeper.store(tokens, EventTokens(tokens, None))
    keeper.events.take([], None)
    pages = page_hashes(tokens)
    keeper.cache.tree.reserve(MODEL, None, pages, Part(1)).commit()
    lease = keeper.cache.tree.lease(MODEL, pages, "a test", Deadline.after(60))
    assert keeper.cache.tree.evict()
    assert lease is not None
    assert keeper.events.take([], None) == []


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with Cache(FAMILY, CacheConfig(host_bytes=40 * PAGE_BYTES, serves=False)) as cache:
        yield Keeper(cache)


@contextmanager
def published(port: int, replay: int) -> Iterator[ZmqEventPublisher]:
    at = "tcp://127.0.0.1:{}".format
    publisher = ZmqEventPublisher(
        0, endpoint=at(port), replay_endpoint=at(replay), bind=True, buffer_steps=10_000
    )
    try:
        yield publisher
    finally:
        publisher.shutdown()


def prompts(random: Random) -> Iterator[list[int]]:
    """Make prompts. Some continue others."""
    known: list[list[int]] = [[]]
    while True:
        begun = random.choice(known)
        begun = begun[: random.randrange(len(begun) + 1) // PAGE * PAGE]
        more = random.randrange(1, 6) * PAGE
        known.append([*begun, *(random.randrange(1 << 20) for _ in range(more))][: 12 * PAGE])
        yield known[-1]


@pytest.mark.parametrize("seed", range(3))
def test_an_index_has_what_memory_has(keeper, seed):
    """Stores and evictions come in any order, through SGLang's publisher and a socket. A follower
    that joins late asks for the events that it has missed."""
    random, tree = Random(seed), keeper.cache.tree
    port, replay = free_port(), free_port()
    stored: dict[tuple[int, ...], PageHash] = {}
    with published(port, replay) as publisher:
        index = Index(port)
        while not index.num_batches:  # It has not joined yet.
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
            index.catch_up()
        for tokens, _ in zip(prompts(random), range(60), strict=False):
            keeper.store(tokens, EventTokens(array("q", tokens), None))
            for number, page in enumerate(page_hashes(tokens), start=1):
                stored[tuple(tokens[: number * PAGE])] = page
            if random.random() < 0.2:
                tree.evict(random.choice([PAGE_BYTES, 20 * PAGE_BYTES]))
            if batch := keeper.events.take([], None):
                publisher.publish(KVEventBatch(ts=1.0, events=batch))
                index.receive()
            assert index.there == {it for it, page in stored.items() if tree.has(MODEL, page)}
        assert tree.num_evictions > 20
        late = Index(port)
        with zmq.Context.instance().socket(zmq.DEALER) as ask:
            ask.connect(f"tcp://127.0.0.1:{replay}")
            ask.send_multipart([b"", (0).to_bytes(8, "big")])
            while (frames := ask.recv_multipart())[2] != ZmqEventPublisher.END_SEQ:
                late.apply(frames[3])
        assert late.tiers == index.tiers
        for follower in (index, late):
            follower.close()
    known = {(it["model"], it["family"]) for it in index.raw if it["type"] == "BlockStored"}
    assert known == {(MODEL, FAMILY.digest)}


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["base", "adapter"])
def test_it_says_what_sglang_would_say_of_the_same(keeper, adapter):
    tokens = prompt(5 * PAGE, seed=1)
    key = adapter and adapter.lora_id
    names = KvEventLoraNames()
    names.register(SimpleNamespace(extra_key=key, lora_id=key), "sql")
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE, lora_names=names)
    root = SimpleNamespace(parent=None, key=[], hash_value=[], event_hash_value=None)
    node = SimpleNamespace(
        parent=root, key=RadixKey(array("q", tokens), key), hash_value=None, event_hash_value=None
    )
    recorder.record_store(node, StorageMedium.CPU)
    recorder.record_remove(node, StorageMedium.CPU)
    keeper.store(tokens[: 3 * PAGE], EventTokens(tokens, adapter))
    keeper.store(tokens, EventTokens(tokens, adapter))
    keeper.events.close()
    first, second, gone = keeper.events.take([], None)
    (stored, removed) = recorder.take()
    assert gone == removed
    assert first.block_hashes + second.block_hashes == stored.block_hashes
    assert first.token_ids + second.token_ids == stored.token_ids
    assert second.parent_block_hash == first.block_hashes[-1]
    fields = ("block_size", "medium", "lora_id", "lora_name", "cache_salt")
    for follower in (first, second):
        assert [getattr(follower, of) for of in fields] == [getattr(stored, of) for of in fields]


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("is_dynamos", [False, True])
def test_sglang_names_an_adapter_by_whatever_key_it_inserts(core, is_dynamos):
    """The base model has no name in the events. If it had one, its KV would count as removed
    together with the adapter's."""
    names, tokens = KvEventLoraNames(), prompt(2 * PAGE, seed=1)
    names.register(lora_id=ADAPTER.lora_id, lora_name=ADAPTER.lora_name)
    tree = sglang_tree(
        core,
        enable_kv_cache_events=True,
        kv_event_lora_names=names,
        dynamo_kv_event_format=is_dynamos,
    )
    insertions = Insertions(None, SimpleNamespace(is_read=False), None, PAGE)  # type: ignore[arg-type]
    insertions.name = names.register

    def insert(_tree: object, req: Any, *, up_to: int) -> None:
        key = RadixKey(req.full_untruncated_fill_ids, req.extra_key)
        tree.insert(InsertParams(key=key, value=torch.arange(up_to)))

    def stored(req: Any) -> set[int]:
        tree.take_events()
        insertions.checkpoint(insert, tree, req, up_to=len(tokens))
        (event,) = tree.take_events()
        assert event.lora_name == (req.lora_id and "sql")
        return {*event.block_hashes}

    reqs = [request_of(tokens, ADAPTER.lora_id) for _ in range(4)]
    prefixes.move(reqs[1], approximate=True)
    prefixes.invoke(reqs[2], at=17)
    prefixes.invoke(reqs[3], at=17)
    prefixes.move(reqs[3], approximate=True)
    namings = [stored(req) for req in (*reqs, request_of(tokens))]
    assert len(set.union(*namings)) == 5 * len(namings[0])
    tree.evict(EvictParams(num_tokens=4 * len(tokens)))
    gone = {block for event in tree.take_events() for block in event.block_hashes}
    assert gone == set.union(*namings[:4])


def test_of_what_others_store_nothing_is_told(keeper):
    """Private entries cause no event. Entries that are added while another one is stored cause none
    either."""
    tokens = prompt(5 * PAGE, seed=1)
    keeper.store(tokens, None)
    keeper.fill(page_hashes(prompt(4 * PAGE, seed=2)))
    keeper.store(tokens, EventTokens(tokens, None))  # It is there.
    keeper.offloader.storing = SimpleNamespace(
        model=MODEL, pages=page_hashes(tokens), event_tokens=EventTokens(tokens, None)
    )
    keeper.fill(page_hashes(tokens), ModelId("another"))
    keeper.fill(page_hashes(prompt(4 * PAGE, seed=3)))
    keeper.cache.tree.evict()
    assert keeper.events.take([], None) == []


def test_nobody_hears_of_tenants_and_of_what_is_one_requests_own(keeper):
    req, about = partial(request_of, [1, 2, 3, 4]), keeper.events.about
    assert about(req(), 1, 3) == EventTokens(array("q", [2, 3]), None)
    lora_id = ADAPTER.lora_id
    mine = req(lora_id=lora_id, extra_key=lora_id)
    assert about(mine, 0, 2) == EventTokens(array("q", [1, 2]), ADAPTER)
    secrets: tuple[dict[str, Any], ...] = (
        {"cache_salt": "bob"},
        {"extra_key": "bob"},
        {"extra_key": ""},
        {"lora_id": lora_id, "extra_key": "bob" + lora_id},
        {"lora_id": "unloaded", "extra_key": "unloaded"},
        {"lora_id": lora_id, "extra_key": f"{lora_id}@2", "droidspeak_invoked_at": 2},
    )
    for fields in secrets:
        assert about(req(**fields), 0, 2) is None, fields


def test_while_nobody_takes_events_only_so_many_wait(keeper, monkeypatch):
    monkeypatch.setattr(store_events, "MAX_WAITING", 2)
    for seed in range(5):
        tokens = prompt(3 * PAGE, seed)
        keeper.store(tokens, EventTokens(tokens, None))
    keeper.cache.tree.evict()
    events = keeper.events.take([], None)
    assert [type(it).__name__ for it in events[:2]] == ["HostStored"] * 2
    gone = {block for it in events[2:] for block in it.block_hashes}
    assert gone == {block for it in events[:2] for block in it.block_hashes}
    counts = {
        kind: keeper.metrics.kv_event_pages.labels(kind)._value.get()
        for kind in ("stored", "removed", "dropped")
    }
    assert counts == {"stored": 6, "removed": 6, "dropped": 9}


@pytest.mark.server
@pytest.mark.slow
def test_a_server_tells_of_its_memory_beside_its_device(tmp_path):
    """The memory has room for two of the prompts. The index has exactly the pages that the memory's
    events name."""
    (model,) = write_models(
        tmp_path, shape("llama", layers=4, hidden=256, heads=4, kv_heads=2), ["model"]
    )
    port, listen = free_port(), Location(f"tcp://127.0.0.1:{free_port()}")
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
    spec = ServerSpec(
        model=model,
        options={**CPU, "kv-events-config": json.dumps(config), "served-model-name": "m"},
        droidspeak={"host_gb": 0.003, "listen": listen},
    )
    texts = [prompt(18 * PAGE + 1, seed) for seed in range(4)]

    def on_host(tokens: Sequence[int]) -> int:
        question = verbs.Find(pages=join_hashes(page_hashes(tokens)))
        holdings = ask(listen, question, verbs.Found, timeout_s=10).holdings
        return sum(PAGE * it.num_pages for it in holdings if it.location == LOCAL)

    index = Index(port)  # It has joined by the time that the server is ready.
    with running(spec, folder=tmp_path, env=ENV) as (server,):
        for tokens in texts:
            answer(server, tokens, max_new_tokens=1)
            eventually(lambda tokens=tokens: on_host(tokens) == 18 * PAGE)

        def is_known() -> bool:
            index.catch_up()
            longest = [
                max((len(it) for it in index.there if it == tuple(of[: len(it)])), default=0)
                for of in texts
            ]
            return longest == [on_host(it) for it in texts]

        eventually(is_known)
        assert on_host(texts[-1]) and not on_host(texts[0])
        for block, path in index.tiers[HOST].items():
            assert index.tiers["GPU"][block] == path
        server.flush()
        eventually(lambda: is_known() and index.num_cleared)
        index.close()
