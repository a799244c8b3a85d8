"""A cache with a tier that its caller made: which questions the tier gets, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import pytest
from tier_parts import fetch, plan_of
from transport_parts import FAMILY, MODEL, PARTS, content, eventually, pages_of, store

from cachetree import (
    LOCAL,
    Cache,
    CacheConfig,
    CacheTree,
    ConfigError,
    Deadline,
    Location,
    ModelId,
    NoteSpeed,
    PageHash,
    Part,
    Search,
    Span,
    Staging,
    WriteBehind,
)
from cachetree.planning import Patience
from cachetree.tier import Write
from cachetree.tree import Change, Lease

SHELF = Location("shelf")


class Shelf(msgspec.Struct, frozen=True):
    num_pages: int


class ShelfTier:
    """A tier that has every page of one model, and answers only by a call of `answer`."""

    location = SHELF
    num_readers = 1
    is_paused = False

    def __init__(self, tree: CacheTree, note_speed: NoteSpeed) -> None:
        self.tree = tree
        self.note_speed = note_speed
        self.used: list[Sequence[PageHash]] = []
        self.asked: list[tuple[Sequence[PageHash], Search]] = []
        self.num_closed = 0

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        for step in staging.steps:
            payload = b"".join(content(page, step) for page in pages)
            staging.write(step, 0, memoryview(payload))
        self.note_speed(64 << 20, 0.5, None)

    def note_use(self, model: ModelId, pages: Sequence[PageHash], parts: Collection[Part]) -> None:
        self.used.append(pages)

    def search(self, pages: Sequence[PageHash]) -> Search:
        search = Search(Deadline.after(10))
        self.asked.append((pages, search))
        return search

    def answer(self) -> None:
        for pages, search in self.asked:
            for part in PARTS:
                self.tree.remote.add(SHELF, MODEL, None, pages, part)
            search.end()

    def status(self) -> Shelf:
        return Shelf(len(self.asked))

    def close(self) -> None:
        self.num_closed += 1


class Shelves(list[ShelfTier]):
    """Makes tiers, and keeps them."""

    def __call__(self, tree: CacheTree, note_speed: NoteSpeed) -> ShelfTier:
        self.append(ShelfTier(tree, note_speed))
        return self[-1]


def test_a_tier_may_note_its_speed_in_several_threads():
    made = Shelves()
    most_at_once = num_at_once = 0

    def clock() -> float:
        """A clock that is read in the middle of a sample."""
        nonlocal most_at_once, num_at_once
        num_at_once += 1
        most_at_once = max(most_at_once, num_at_once)
        time.sleep(0.01)
        num_at_once -= 1
        return time.monotonic()

    with Cache(FAMILY, CacheConfig(serves=False), tiers=[made], clock=clock):
        args = 64 << 20, 0.5, None
        threads = [threading.Thread(target=made[0].note_speed, args=args) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most_at_once == 1


def test_a_tier_is_searched_matched_fetched_from_and_closed():
    made = Shelves()
    pages = pages_of(6)
    with Cache(FAMILY, CacheConfig(serves=False), tiers=[made]) as cache:
        (tier,) = made
        (search,) = cache.search(pages)
        assert not search.is_over
        assert cache.match(pages) == []
        tier.answer()
        assert search.is_over
        assert [(it.location, it.num_pages) for it in cache.match(pages)] == [(SHELF, 6)]
        tier.is_paused = True
        assert cache.match(pages) == [], "planned from where nothing can be read"
        tier.is_paused = False
        assert cache.link(SHELF) is None
        fetch(cache, SHELF, pages, Span(0, len(pages)))
        assert cache.link(SHELF).byte_s == pytest.approx(1 / (128 << 20))
        assert tier.used == []
        store(cache.tree, pages)
        fetch(cache, LOCAL, pages, Span(0, len(pages)))
        assert tier.used == [pages]
        assert cache.status().tiers == {SHELF: Shelf(1)}
    assert tier.num_closed == 1


@pytest.mark.parametrize(
    ("num_readers", "num_ahead", "beside"),
    [(1, 14, []), (2, 12, [2]), (3, 6, [2, 6]), (9, 0, [2, 4, 8])],
)
def test_a_fetch_is_not_late_while_a_tier_reads_those_before_it(num_readers, num_ahead, beside):
    """The fetch is not late either while the tier reads its only part, because this is seen only at
    its end. With several readers, the longest fetches run at the same time as fetches ahead."""

    class SlowTier(ShelfTier):
        def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
            pass

    def make(tree: CacheTree, note_speed: NoteSpeed) -> ShelfTier:
        made = SlowTier(tree, note_speed)
        made.num_readers = num_readers
        note_speed(64 << 20, 64.0, None)
        return made

    with Cache(FAMILY, CacheConfig(serves=False), tiers=[make]) as cache:
        stagings = [
            cache.fetch(plan_of(SHELF, Span(0, n)), pages_of(n), Deadline.after(9))
            for n in (8, 2, 4)
        ]
        assert all(stagings)
        link, page_bytes = cache.link(SHELF), stagings[0].num_bytes // 8
        assert link.ahead == num_ahead * page_bytes
        assert link.backlog == [it * page_bytes for it in beside]
        wait_s = link.fixed_s + link.seconds(4 * page_bytes)
        patience = Patience(saving_s=0.01, wait_s=wait_s, link=link)
        assert patience.limit_s(0) == pytest.approx(wait_s + 0.01)
        assert link.rest_s(wait_s / 2, 1, 4 * page_bytes) == 0.0, "no rate is told from a part"
        for staging in stagings:
            staging.release()
        assert cache.link(SHELF).seconds(page_bytes) == pytest.approx(page_bytes / (1 << 20))


def test_a_cache_without_tiers_searches_nothing():
    with Cache(FAMILY, CacheConfig(serves=False)) as cache:
        assert cache.search(pages_of(4)) == []
        staging = cache.fetch(plan_of(SHELF, Span(0, 4)), pages_of(4), Deadline.after(5))
        eventually(lambda: "shelf is not a peer" in str(staging.error))


def test_a_search_ends_at_its_deadline():
    now = [0.0]
    search = Search(Deadline(5.0, lambda: now[0]))
    assert not search.is_over
    now[0] = 5.0
    assert search.is_over


def test_a_tier_that_cannot_work_stops_the_start_and_closes_the_others():
    made = Shelves()

    def refuse(tree: CacheTree, note_speed: NoteSpeed) -> ShelfTier:
        raise ConfigError("shelf is full; buy another")

    with pytest.raises(ConfigError, match="shelf is full"):
        Cache(FAMILY, CacheConfig(serves=False), tiers=[made, refuse])
    assert made[0].num_closed == 1


def written_behind(tree: CacheTree, write: Write) -> WriteBehind:
    return WriteBehind(tree, SHELF, "test-write", write, time.monotonic, lambda it: len(it.pages))


def test_a_write_that_is_under_way_learns_that_its_time_is_over():
    """The writing thread may ask before the constructor returns."""
    begun = threading.Event()
    answers: list[bool] = []

    def write(change: Change, lease: Lease, is_over: Callable[[], bool]) -> bool:
        answers.append(is_over())
        begun.set()
        until = Deadline.after(30)
        while not (is_over() or until.has_passed):
            time.sleep(0.01)
        answers.append(is_over())
        return True

    tree = CacheTree(FAMILY, host_bytes=1 << 20)
    tree.reserve(MODEL, None, pages_of(2)).commit()
    behind = written_behind(tree, write)
    assert begun.wait(30)
    assert behind.close(0.0)
    behind.close(60.0)
    assert behind.is_over(), "a second close gave it more time"
    assert (answers, behind.num_late) == ([False, True], 0)


def test_late_entries_stay_counted_while_another_is_written(monkeypatch):
    monkeypatch.setattr("cachetree.tier.MAX_WAITING", 1)
    begun, may_end = threading.Event(), threading.Event()

    def write(change: Change, lease: Lease, is_over: Callable[[], bool]) -> bool:
        begun.set()
        return may_end.wait(30)

    tree = CacheTree(FAMILY, host_bytes=1 << 20)
    behind = written_behind(tree, write)
    tree.reserve(MODEL, None, pages_of(2, "0 ")).commit()
    assert begun.wait(30)
    for number in range(1, 12):  # The first of them waits.
        tree.reserve(MODEL, None, pages_of(2, f"{number} ")).commit()
    may_end.set()
    assert behind.close(30)
    assert behind.num_late == 10
