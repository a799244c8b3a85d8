"""Long work on a tree is done in slices. Between slices, other threads get the lock."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from itertools import count
from types import FrameType

import pytest
from tree_parts import (
    FAMILY,
    FAR,
    FARTHER,
    PAGE,
    A,
    B,
    FakeTime,
    advertise,
    make_tree,
    num_pages,
    path,
    store,
)

from cachetree.ids import KV, LOCAL, Location, Part
from cachetree.tree.entries import Change
from cachetree.tree.eviction import Retention
from cachetree.tree.slices import SLICE
from cachetree.tree.tree import CacheTree

MOST_CALLS = 40 * SLICE
"""Largest number of Python functions that are called while the lock is held once: 40 for each
visited node."""


class CountingLock:
    """A lock that counts the functions that are called while it is held."""

    def __init__(self) -> None:
        self.num_calls: list[int] = []

    def __enter__(self) -> None:
        self.num_calls.append(0)
        sys.setprofile(self._count)

    def __exit__(self, exc_type, exc, traceback):
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self.num_calls[-1] += event == "call"


def counted(tree: CacheTree) -> CountingLock:
    """Replace the tree's lock by one that counts, and return it."""
    lock = CountingLock()
    for part in (tree, tree.remote):
        part._lock = lock  # type: ignore[misc, assignment]
    return lock


def forked(tree: CacheTree, num: int, location: Location = LOCAL) -> None:
    """Store so many prompts. Each has a node of its own, below one node that all share."""
    for number in range(num):
        text = f"s{chr(1000 + number)}t"
        if location == LOCAL:
            store(tree, A, text)
        else:
            advertise(tree, location, A, text, 1)


@pytest.mark.parametrize(
    "work",
    [
        lambda tree: tree.pages_by_model(),
        lambda tree: list(tree.subscribe(lambda change: None)[0]),
        lambda tree: list(tree.subscribe_kept(lambda change: None)[0]),
        lambda tree: tree.remote.forget(FAR),
        lambda tree: (tree.remote.limit(FAR, 10), tree.remote.add(FAR, A, None, path("x"))),
        lambda tree: tree.remote.drop_in_slices(FAR, A, path("s")),
        lambda tree: advertise(tree, FAR, A, "s", 0, 1),
        lambda tree: store(tree, A, "s", e_layers=[1]),
        lambda tree: tree.evict(),
        lambda tree: tree.evict(A, path("s")),
    ],
    ids=[
        "scrape",
        "subscribe",
        "kept",
        "forget",
        "trim",
        "drop",
        "advert",
        "gain",
        "evict",
        "evict some",
    ],
)
def test_work_under_one_hold_of_the_lock_is_bounded(work):
    tree = make_tree(3 * 900)
    forked(tree, 900)
    forked(tree, 900, FAR)
    forked(tree, 900, FARTHER)
    lock = counted(tree)
    work(tree)
    assert max(lock.num_calls) <= MOST_CALLS
    assert tree.match(path("st"))
    assert num_pages(tree, A, f"s{chr(1000)}t", FARTHER) == 3


class BusyLock(CountingLock):
    """A lock that calls a function each time after it was held."""

    def __init__(self, others: Callable[[], object]) -> None:
        super().__init__()
        self._others = others
        self._is_busy = False

    def __exit__(self, *args: object) -> None:
        super().__exit__(None, None, None)
        if not self._is_busy:
            self._is_busy = True
            self._others()
            self._is_busy = False


def test_node_split_during_eviction_leaves_except_its_kept_pages():
    tree = make_tree(900)
    store(tree, A, "abcdef")
    for number in range(60):
        store(tree, A, "abcdef" + chr(1000 + number))
    holds = count()
    # In the midst of it.
    lock = BusyLock(lambda: next(holds) == 3 and tree.pin(A, path("ab")))
    tree._lock = lock  # type: ignore[misc, assignment]
    tree.evict()
    assert tree.num_pages == num_pages(tree, A, "abcdef") == 2


def test_pages_that_arrive_while_their_parent_is_dropped_leave_too():
    tree = make_tree(900)
    forked(tree, 60, FAR)
    numbers = count(2000)

    def more() -> None:
        tree.remote.add(FAR, A, path("s")[0], path(f"s{chr(next(numbers))}")[1:])

    tree.remote._lock = BusyLock(more)  # type: ignore[misc, assignment]
    for part in (KV, Part(1)):
        tree.remote.drop_in_slices(FAR, A, path("s"), part)
    assert tree.remote.num_pages[FAR] == 0
    assert not tree.match(path(f"s{chr(2001)}"))


def test_entries_that_have_grown_old_go_in_slices_too():
    clock = FakeTime()
    tree = CacheTree(FAMILY, host_bytes=2000 * PAGE, clock=clock, retention=Retention(ttl_s=1))
    forked(tree, 500)
    clock.now_s = 2
    lock = counted(tree)
    store(tree, A, "x")
    assert tree.num_pages == 1
    assert max(lock.num_calls) <= MOST_CALLS


def reach(tree, model, text, location=LOCAL):
    """Number of pages with KV, and with E by layer, that a match finds."""
    by_model = {it.model: it for it in tree.match(path(text)) if it.location == location}
    return (
        (by_model[model].num_pages, dict(by_model[model].e_pages)) if model in by_model else (0, {})
    )


def test_snapshot_and_later_changes_add_up_to_the_tree():
    """The test reads the snapshot piece by piece, while entries are added and removed."""
    for seed in range(20):
        rng = random.Random(seed)
        tree = CacheTree(FAMILY, host_bytes=120 * PAGE, clock=FakeTime())

        def some_text(rng: random.Random = rng) -> str:
            return "".join(rng.choices("ab", k=rng.randint(1, 9)))

        for _ in range(60):
            store(tree, rng.choice((A, B)), some_text(), e_layers=rng.choice(([], [1])))
        changes: deque[Change] = deque()
        first_changes, unsubscribe = tree.subscribe(changes.append)
        seen: list[Change] = []
        while (change := next(first_changes, None)) is not None:
            seen.append(change)
            if rng.random() < 0.5:
                store(tree, rng.choice((A, B)), some_text())
            if rng.random() < 0.2:
                tree.evict(rng.choice((A, B, None)), path(some_text()))
        unsubscribe()
        other = make_tree()
        for change in (*seen, *changes):
            if change.added:
                other.remote.add(FAR, change.model, change.parent, change.pages, change.part)
            else:
                other.remote.drop(FAR, change.model, change.pages, change.part)
        for text in {some_text() for _ in range(200)}:
            for model in (A, B):
                ours, theirs = reach(tree, model, text), reach(other, model, text, FAR)
                assert ours == theirs, f"seed {seed}: {model} has {ours}, told were {theirs}"


def test_a_location_is_noted_up_to_its_limit_and_the_coldest_go():
    tree = make_tree()
    tree.remote.limit(FAR, 12)
    for text in ("abcdef", "abxyz", "mno"):
        tree.remote.add(FAR, A, None, path(text))
    assert (tree.remote.num_pages[FAR], tree.remote.num_dropped[FAR]) == (12, 0)
    assert num_pages(tree, A, "abcdef", FAR) == 6  # A use.
    tree.remote.add(FARTHER, A, None, path("abxyz"))
    tree.remote.add(FAR, A, None, path("vw"))
    assert num_pages(tree, A, "abxyz", FAR) == 2
    assert num_pages(tree, A, "abcdef", FAR) == 6
    assert num_pages(tree, A, "abxyz", FARTHER) == 5, "it has no limit"
    assert (tree.remote.num_pages[FAR], tree.remote.num_dropped[FAR]) == (11, 3)
    tree.remote.forget(FAR)
    assert (tree.remote.num_pages[FAR], tree.remote.num_dropped[FAR]) == (0, 3)
    assert num_pages(tree, A, "abxyz", FARTHER) == 5


@pytest.mark.parametrize("seed", range(5))
def test_no_flood_of_adverts_exceeds_the_limit_or_keeps_a_store_out(seed):
    rng = random.Random(seed)
    tree = make_tree(40)
    tree.remote.limit(FAR, 50)
    texts: list[str] = []
    for _ in range(400):
        text = rng.choice(texts or ["a"])[: rng.randint(0, 6)] + "".join(rng.choices("abcd", k=5))
        texts.append(text)
        pages = path(text)
        if rng.random() < 0.2:
            rng.shuffle(pages)
        tree.remote.add(FAR, rng.choice((A, B)), None, pages)
        assert tree.remote.num_pages[FAR] <= 50
        if rng.random() < 0.2:
            stored = rng.choice(texts)
            store(tree, A, stored)
            assert num_pages(tree, A, stored) == len(stored)
    tree.remote.forget(FAR)
    tree.evict()
    assert (tree.remote.num_pages[FAR], tree.num_pages) == (0, 0)
    assert not any(tree.match(path(text)) for text in texts)
