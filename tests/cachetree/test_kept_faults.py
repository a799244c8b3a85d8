"""A worker that keeps copies has faulty or slow peers, or more entries than its limits allow."""

from __future__ import annotations

import time
from collections.abc import Callable

from kept_parts import PAGE_TOTAL, PAGES, cache_of, keep, num_kept, pulls, settled
from transport_parts import (
    E_LAYER,
    FAMILY,
    MODEL,
    PAGE_BYTES,
    ScriptedWorker,
    eventually,
    new_keeper,
    new_tree,
    pages_of,
    store,
)

from cachetree import KV, WorkerConfig
from cachetree.transport import wire

Script = Callable[[ScriptedWorker, bytes, wire.Fetch], None]


class Engine(ScriptedWorker):
    """An engine that advertises entries which it does not have."""

    def __init__(
        self, num_entries: int, script: Script, model: str = MODEL, part: int = KV
    ) -> None:
        self._entries = [
            wire.Entry(added=True, model=model, parent=b"", pages=page, part=part)
            for page in pages_of(num_entries)
        ]
        super().__init__(script)

    def turn(self) -> None:
        for identity in self.channels if self._entries else ():
            for entry in self._entries:
                self.send(identity, wire.Entries(entries=(entry,)))
            self._entries = []


def refused(engine: ScriptedWorker, identity: bytes, fetch: wire.Fetch) -> None:
    engine.send(identity, wire.Ended(id=fetch.id, error="failed", reason="too busy"))


def test_entries_that_cannot_be_fetched_are_left_out_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr("cachetree.transport.pulls._PAUSE_S", 0.01)
    with Engine(2, refused) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed == 2)
        eventually(lambda: settled(worker))
        assert "too busy" in worker.sources()[0].reason
        assert worker.tree.num_bytes == 0
    assert sum("not all of peer" in it for it in caplog.messages) == 1


def test_model_id_of_a_peer_forges_no_line_in_the_log(caplog):
    with (
        Engine(1, refused, "m\nWARNING forged\x1b[31m") as engine,
        keep(engine, host_bytes=0) as worker,
    ):
        eventually(lambda: pulls(worker).num_failed)
        assert "m WARNING forged" in worker.sources()[0].reason
    (line,) = (it for it in caplog.messages if "not all of peer" in it)
    assert line.isprintable() and worker.sources()[0].reason.isprintable()


def test_e_without_its_kv_counts_as_not_copied():
    with Engine(1, refused, part=E_LAYER) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed)
        assert "KV of some of them is missing" in pulls(worker).error


def test_a_fetch_that_hangs_is_given_up_alone(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._FETCH_S", 0.05)
    with Engine(1, lambda *_: None) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed)
        assert "in time" in pulls(worker).error
        assert worker.tree.num_bytes == 0


def test_a_peer_that_advertises_endlessly_costs_a_bounded_list(monkeypatch, caplog):
    monkeypatch.setattr("cachetree.transport.pulls._MAX_WAITING", 4)
    with Engine(50, lambda *_: None) as engine, keep(engine) as worker:
        eventually(lambda: pulls(worker).num_failed >= 45)
        assert pulls(worker).num_waiting == 1 + 4
        assert "wait to be copied" in worker.sources()[0].reason
    assert sum("not all of peer" in it for it in caplog.messages) == 1


def test_entries_given_up_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._MAX_GIVEN_UP", 2 * 3)
    tree = new_tree()
    keeper = new_keeper(tree)

    def given_up() -> list[bool]:
        return [keeper.has_given_up((MODEL, page, KV)) for page in PAGES[:5]]

    for page in PAGES[:5]:
        store(tree, [page])
        tree.evict()
    assert given_up() == [False, False, True, True, True]
    for page in PAGES[:5]:
        store(tree, [page])
    assert given_up() == 5 * [False]


def test_a_cap_holds_over_all_fetches_together():
    rate_mb_s = 64 * PAGE_TOTAL / 0.15 / 1e6
    with cache_of() as engine:
        for name in "abc":
            store(engine.tree, pages_of(64, name))
        begun_at_s = time.monotonic()
        with keep(engine, max_pull_mb_s=rate_mb_s) as worker:
            eventually(lambda: worker.tree.num_pages == 3 * 64)
        assert time.monotonic() - begun_at_s > 2 * 0.15 - 0.05


def test_a_long_entry_comes_in_several_fetches(monkeypatch):
    monkeypatch.setattr("cachetree.transport.pulls._PART_BYTES", 10 * PAGE_TOTAL)
    with cache_of() as engine, keep(engine) as worker:
        store(engine.tree, PAGES)
        eventually(lambda: num_kept(worker) == 64)
        assert pulls(worker).num_fetched == 6 + 6, "the nodes of the first six"


def test_a_slow_source_is_copied_in_parts_that_end_in_time(monkeypatch):
    """The whole entry would take twice as long as one fetch may take."""
    pages = pages_of(512, "long")
    kv_bytes = len(pages) * FAMILY.num_layers * PAGE_BYTES
    monkeypatch.setattr("cachetree.transport.pulls._FETCH_S", 1.0)
    monkeypatch.setattr("cachetree.transport.pulls._PLANNED_S", 0.2)
    monkeypatch.setattr("cachetree.transport.pulls._FIRST_PART_BYTES", kv_bytes // 10)
    slow = WorkerConfig(max_bytes_per_s=kv_bytes / 2, shared_memory=False)
    with cache_of(worker=slow) as engine:
        engine.tree.reserve(MODEL, None, pages).commit()
        with keep(engine) as worker:
            eventually(lambda: worker.tree.num_pages == 512 or pulls(worker).error)
            assert pulls(worker).error == ""
            assert pulls(worker).num_fetched <= 12
