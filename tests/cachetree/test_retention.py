"""Pins keep entries that are not used, and the time to live removes entries although there is
room."""

from __future__ import annotations

import pytest
from transport_parts import eventually
from tree_parts import FAMILY, FAR, PAGE, A, B, FakeTime, make_tree, path, store

from cachetree.cache import Cache
from cachetree.config import CacheConfig
from cachetree.errors import ConfigError, PinRefused
from cachetree.ids import PageHash
from cachetree.transport import ask, verbs
from cachetree.tree import join_hashes
from cachetree.tree.eviction import Retention
from cachetree.tree.tree import CacheTree


def test_a_pin_of_pages_that_are_no_prompt_keeps_what_begins_as_they_do():
    tree = make_tree()
    store(tree, A, "a")
    store(tree, A, "ab")
    store(tree, A, "abcde")
    store(tree, B, "ab")
    no_prompt = [path("a")[0], path("az")[1], *path("abcde")[2:]]
    assert tree.pin(None, no_prompt) == {A: 1, B: 1}
    assert tree.unpin(None, no_prompt)
    assert tree.pin(A, []) == {}
    assert tree.pin(None, path("unknown")) == {}, "the answer says that nothing is pinned"
    assert not tree.unpin(None, path("unknown"))


def test_a_cache_hands_its_settings_on():
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


def test_sweep_of_a_crowd_takes_several_turns():
    """A caller of `sweep`, such as a forward that stores its pages, waits only for one turn."""
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


def test_worker_drops_expired_entries_without_a_call():
    clock = FakeTime()
    with Cache(FAMILY, CacheConfig(host_bytes=4 * PAGE, ttl_s=10), clock=clock) as cache:
        store(cache.tree, A, "abc")
        clock.now_s = 10.0
        eventually(lambda: cache.tree.num_pages == 0)


def test_an_operators_question_keeps_nothing_in_memory():
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
