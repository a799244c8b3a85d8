"""LRU compared with a textbook implementation, on prompts of one page and on prompts that share
pages."""

from __future__ import annotations

import random
from collections import OrderedDict

import msgspec
import pytest
from tree_parts import (
    FAMILY,
    KV,
    KV_PART,
    PAGE,
    A,
    far_future,
    leased,
    make_tree,
    num_pages,
    path,
    store,
)

from cachetree.errors import ConfigError
from cachetree.ids import PageHash, Part
from cachetree.tree.entries import Change
from cachetree.tree.eviction import Retention
from cachetree.tree.tree import CacheTree

SIZE = 19
"""Pages in the budget."""


class TextbookLru:
    def __init__(self) -> None:
        self.pages: OrderedDict[PageHash, None] = OrderedDict()

    def hit(self, page: PageHash) -> None:
        self.pages.move_to_end(page)

    def insert(self, page: PageHash) -> list[PageHash]:
        gone = [self.pages.popitem(last=False)[0]] if len(self.pages) == SIZE else []
        self.pages[page] = None
        return gone


@pytest.mark.parametrize("seed", range(3))
def test_without_shared_prefixes_it_is_the_textbooks(seed):
    tree = make_tree(SIZE)
    textbook = TextbookLru()
    gone: list[PageHash] = []

    def note(change: Change) -> None:
        if not change.added:
            gone.extend(change.pages)

    tree.subscribe(note)
    rng = random.Random(seed)
    num_evictions = num_hits = 0
    for _ in range(3000):
        page = PageHash(int(rng.paretovariate(0.6)).to_bytes(16, "big")[-16:])
        if tree.match([page]):
            textbook.hit(page)
            num_hits += 1
        else:
            reservation = tree.reserve(A, None, [page])
            reservation.commit()
            assert gone == textbook.insert(page)
            num_evictions += len(gone)
            gone.clear()
    assert num_evictions > 500 and num_hits > 500


def test_skipped_entry_gets_its_turn_again():
    tree = make_tree(4)
    store(tree, A, "a")
    store(tree, A, "b")
    lease = tree.lease(A, path("a"), "test", far_future(), is_use=False)
    store(tree, A, "xyz")  # passes by a, and takes b
    lease.release()
    store(tree, A, "w")
    assert [num_pages(tree, A, text) for text in ("a", "xyz", "w")] == [0, 3, 1]


def test_e_finds_room_where_all_that_is_free_is_torn():
    """A page of E is as large as four pages of KV. Eviction leaves holes of one page of KV."""
    tree = CacheTree(msgspec.structs.replace(FAMILY, hidden_size=16), host_bytes=12 * PAGE)

    def put(text: str, part: Part = KV_PART) -> bool:
        reservation = tree.reserve(A, None, path(text), part)
        if reservation is not None:
            reservation.commit()
        return reservation is not None

    for text in ("ax", "bx", "cx", "ay", "by", "cy", "d", "e", "f"):
        assert put(text)
    for text in ("ay", "by", "cy"):
        tree.match(path(text))
    leased(tree, A, "d")
    # Three tails give enough bytes, d is read, and only e and f lie side by side.
    assert put("g") and put("g", Part(1))
    assert tree.num_evictions == 5
    assert [num_pages(tree, A, it) for it in ("ay", "by", "cy", "d", "g")] == [2, 2, 2, 1, 1]
    leases = [leased(tree, A, text) for text in ("ay", "by", "cy")]
    assert all([*leases, leased(tree, A, "g", 1)])
    assert put("h") and not put("h", Part(1))
    assert tree.num_evictions == 5
    assert tree.num_bytes == 9 * PAGE + 4 * KV


def test_bad_retention_is_refused_with_its_value():
    with pytest.raises(ConfigError, match="ttl_s is 0"):
        Retention(ttl_s=0)
    with pytest.raises(ConfigError, match=r"max_pinned_share is 1\.5"):
        Retention(max_pinned_share=1.5)


def test_a_search_meets_the_same_obstacle_once():
    """A search skips a held entry once, even if many evictions follow."""
    tree = make_tree(40)
    held = [chr(0x100 + i) for i in range(30)]
    for text in held:
        store(tree, A, text)
        leased(tree, A, text)
    looks = 0

    def count(entry: object) -> bool:
        nonlocal looks
        looks += 1
        return not (entry.num_children or entry.holds)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachetree.tree.entries.LocalEntry.is_evictable", property(count))
        for i in range(100):
            store(tree, A, chr(0x200 + i))
    assert looks < 30 + 3 * 100


def test_stale_places_in_the_heap_do_not_pile_up():
    tree = make_tree(4)
    order = tree._eviction
    for i in range(500):
        store(tree, A, chr(0x100 + i) + "ab")
    assert len(order._heap) + len(order._line) <= 2 * len(order._queued) + 64
