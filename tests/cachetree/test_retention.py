"""Pins keep entries that are not used, and the time to live removes entries although there is
room."""

from __future__ import annotations

import pytest
from tree_parts import FAMILY, FAR, PAGE, A, B, FakeTime, make_tree, num_pages, path, store

from cachetree.cache import Cache
from cachetree.clock import Deadline
from cachetree.config import CacheConfig
from cachetree.errors import ConfigError, PinRefused
from cachetree.ids import PageHash
from cachetree.transport import ask, verbs
from cachetree.tree import join_hashes
from cachetree.tree.eviction import Retention
from cachetree.tree.tree import CacheTree


def test_a_pinned_prefix_stays_until_it_is_unpinned() -> None:
    tree = make_tree(8)
    store(tree, A, "abcd")
    store(tree, B, "ab")
    assert tree.pin(A, path("ab")) == {A: 2}
    assert tree.num_pinned_bytes == 2 * PAGE
    for i in range(6):
        store(tree, B, chr(0x100 + i) + "yz")
    assert [num_pages(tree, model, "abcd") for model in (A, B)] == [2, 0]
    assert tree.unpin(A, path("ab"))
    assert not tree.unpin(A, path("ab"))
    assert tree.num_pinned_bytes == 0
    reservation = tree.reserve(B, None, path("01234567"))  # needs all there is
    assert reservation is not None
    assert num_pages(tree, A, "abcd") == 0


def test_a_pin_of_all_models_takes_what_each_has() -> None:
    tree = make_tree()
    store(tree, A, "abcd")
    store(tree, B, "abx")
    assert tree.pin(None, path("abcdef")) == {A: 4, B: 2}
    assert tree.pin(None, path("z")) == {}
    assert tree.pin(A, []) == {}
    tree.evict()
    assert [num_pages(tree, model, "abcd") for model in (A, B)] == [4, 2]
    assert num_pages(tree, B, "abx") == 2


def test_a_pin_of_pages_that_are_no_prompt_keeps_what_begins_as_they_do() -> None:
    tree = make_tree()
    store(tree, A, "a")
    store(tree, A, "ab")
    store(tree, A, "abcde")
    store(tree, B, "ab")
    no_prompt = [path("a")[0], path("az")[1], *path("abcde")[2:]]
    assert tree.pin(None, no_prompt) == {A: 1, B: 1}
    assert tree.unpin(None, no_prompt)
    assert tree.pin(None, path("unknown")) == {}, "the answer says that nothing is pinned"
    assert not tree.unpin(None, path("unknown"))


def test_a_pin_ends_at_its_deadline_and_the_same_pin_renews_it() -> None:
    clock = FakeTime()
    tree = make_tree(4, clock)
    store(tree, A, "ab")
    tree.pin(A, path("ab"), Deadline.after(5, clock))
    clock.now_s = 4.0
    tree.pin(A, path("ab"), Deadline.after(5, clock))
    clock.now_s = 8.9
    store(tree, A, "xy")
    store(tree, A, "zw")
    assert num_pages(tree, A, "ab") == 2
    clock.now_s = 9.0
    store(tree, A, "stuv")
    assert num_pages(tree, A, "ab") == 0
    assert tree.num_pinned_bytes == 0


def test_pins_keep_no_more_than_their_share() -> None:
    tree = make_tree(8)
    store(tree, A, "abc")
    store(tree, A, "xyz")
    assert tree.pin(A, path("abc")) == {A: 3}
    with pytest.raises(PinRefused, match=f"would keep {6 * PAGE} bytes, {3 * PAGE} of them"):
        tree.pin(A, path("xyz"))
    assert tree.pin(A, path("ab")) == {A: 2}  # the same memory
    assert tree.num_pinned_bytes == 3 * PAGE
    # What pins leave is given; what would need theirs is refused, not waited for.
    assert tree.reserve(A, None, path("012345")) is None
    store(tree, A, "01234")
    assert num_pages(tree, A, "abc") == 3


def test_a_cache_hands_its_settings_on() -> None:
    with pytest.raises(ConfigError, match="ttl_s is 0"):
        CacheConfig(ttl_s=0)
    config = CacheConfig(host_bytes=4 * PAGE, serves=False, ttl_s=10, max_pinned_share=0.25)
    clock = FakeTime()
    with Cache(FAMILY, config, clock=clock) as cache:
        store(cache.tree, A, "a")
        for text in "xyw":
            store(cache.tree, A, text)
        assert cache.tree.pin(A, path("a")) == {A: 1}
        assert cache.tree.num_pinned_bytes == PAGE
        with pytest.raises(PinRefused):
            cache.tree.pin(A, path("w"))
        clock.now_s = 10.0
        cache.tree.sweep()
        assert cache.tree.num_pages == 1


def test_unused_entries_leave_after_their_time() -> None:
    clock = FakeTime()
    tree = CacheTree(
        FAMILY,
        host_bytes=100 * PAGE,
        clock=clock,
        retention=Retention(ttl_s=10),
    )
    store(tree, A, "ab")
    store(tree, A, "abc", start=2)
    store(tree, A, "x")
    store(tree, B, "p")
    tree.pin(B, path("p"))
    clock.now_s = 5.0
    assert num_pages(tree, A, "ab") == 2
    clock.now_s = 9.9
    tree.sweep()
    assert tree.num_pages == 5
    clock.now_s = 10.0
    tree.sweep()  # c and x
    assert [num_pages(tree, A, text) for text in ("abc", "x")] == [2, 0]
    clock.now_s = 20.0
    store(tree, A, "y")  # sweeps too
    assert (num_pages(tree, A, "ab"), num_pages(tree, A, "y")) == (0, 1)
    assert num_pages(tree, B, "p") == 1
    tree.unpin(B, path("p"))
    clock.now_s = 30.0
    tree.sweep()
    assert tree.num_bytes == 0


def test_sweep_of_a_crowd_takes_several_turns() -> None:
    """So a caller of `sweep`, such as a forward that stores its pages, waits only for a short
    time."""
    clock = FakeTime()
    tree = CacheTree(FAMILY, host_bytes=1000 * PAGE, clock=clock, retention=Retention(ttl_s=10))
    for number in range(1000):
        reservation = tree.reserve(A, None, [PageHash(number.to_bytes(16))])
        assert reservation is not None
        with reservation:
            reservation.commit()
    clock.now_s = 10.0
    tree.sweep()
    assert 0 < tree.num_pages < 1000
    tree.sweep()
    assert tree.num_pages == 0


def test_an_operators_question_keeps_nothing_in_memory() -> None:
    """The question may be about the cache's own entries, or about those of peers."""
    clock, pages = FakeTime(), path("abcdefgh")
    with Cache(FAMILY, CacheConfig(host_bytes=100 * PAGE, ttl_s=1), clock=clock) as cache:
        assert cache.address
        store(cache.tree, A, "abcdefgh")
        cache.tree.remote.limit(FAR, 2 * len(pages))
        for far in (pages, path("ABCDEFGH")):
            cache.tree.remote.add(FAR, A, None, far)
        question = verbs.Find(pages=join_hashes(pages))
        for is_here in (True, True, False):
            cache.tree.sweep()
            answer = ask(cache.address, question, verbs.Found, timeout_s=5)
            assert len(answer.holdings) == 1 + is_here
            clock.now_s += 0.5
        cache.tree.remote.add(FAR, A, None, path("12345678"))
        assert cache.tree.remote.reach(FAR, A, pages) == 0
