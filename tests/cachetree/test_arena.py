"""The arena: what is lent is nobody else's, and physical memory stays within the budget."""

from __future__ import annotations

import gc
import mmap
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_parts import FAMILY, FAR, path

from cachetree import Deadline, ModelId
from cachetree.checkpoint.family import Family
from cachetree.ids import Span
from cachetree.memory.arena import Arena, pool_of
from cachetree.memory.pool import NoRoom, PlainPool
from cachetree.memory.ranges import Ranges
from cachetree.memory.slab import Layout, Slab
from cachetree.memory.staging import pageable
from cachetree.tree.tree import CacheTree

UNIT = mmap.PAGESIZE
MODEL = ModelId("m")
spans = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda it: Span(it[0], sum(it)))


@given(st.lists(st.tuples(st.booleans(), spans), max_size=40))
def test_ranges_are_a_set_in_few_spans(steps: list[tuple[bool, Span]]) -> None:
    ranges, oracle = Ranges(), set[int]()
    for adds, span in steps:
        out = ranges.take_out(span)
        assert {number for part in out for number in part} == oracle & set(span)
        oracle -= set(span)
        if adds:
            ranges.add(span)
            oracle |= set(span)
        assert [number for part in ranges for number in part] == sorted(oracle)
        assert ranges.num_bytes == len(oracle)
        assert len(ranges) == sum(number - 1 not in oracle for number in oracle)
        for number in (0, 20, 51):
            assert (number in ranges.around(number)) == (number in oracle)
            assert set(ranges.around(number)) <= oracle


def fill(loan: memoryview, mark: int) -> None:
    np.frombuffer(loan, np.uint8)[:] = mark


def is_filled(loan: memoryview, mark: int) -> bool:
    return bool((np.frombuffer(loan, np.uint8) == mark).all())


@pytest.mark.parametrize("seed", range(4))
def test_churn_never_lends_twice_and_stays_within_the_budget(seed: int) -> None:
    chance = random.Random(seed)
    budget = 64 * UNIT
    arena = Arena(budget)
    lent: list[tuple[memoryview, list[Span], int]] = []
    num_refused = 0
    for number in range(4000):
        mark = number % 251
        if chance.random() < 0.5:
            try:
                loan = arena.take(chance.choice([1, UNIT, 3 * UNIT, 16 * UNIT - 5, 30 * UNIT]))
            except NoRoom:
                num_refused += 1
                assert arena.held_bytes > budget - 30 * UNIT
            else:
                fill(loan, mark)
                lent.append((loan, [Span(0, arena.size_of(loan.nbytes))], mark))
                del loan
        elif lent:
            loan, parts, mark = lent.pop(chance.randrange(len(lent)))
            assert all(is_filled(loan[part.start : part.stop], mark) for part in parts)
            whole = parts.pop(chance.randrange(len(parts)))
            cut = chance.randrange(0, len(whole), UNIT)
            given = Span(whole.start + cut, whole.stop)
            parts += [Span(whole.start, given.start)] * (cut > 0)
            loan = arena.give_back(loan, [given])
            if parts:
                lent.append((loan, parts, mark))
            del loan
        assert arena.held_bytes == sum(len(part) for _, parts, _ in lent for part in parts)
        assert arena.physical_bytes <= budget + UNIT
    assert 0 < num_refused < 1500
    for loan, parts, mark in lent:
        assert all(is_filled(loan[part.start : part.stop], mark) for part in parts)


def test_what_was_given_back_is_lent_again_while_it_is_warm() -> None:
    arena = Arena(32 * UNIT)
    loan = arena.take(16 * UNIT)
    place = arena.place_of(loan)
    fill(loan, 1)
    loan = arena.give_back(loan, [Span(0, 16 * UNIT)])
    again = arena.take(10 * UNIT)
    assert arena.place_of(again) == place
    assert is_filled(again, 1), "it has new pages"
    assert arena.physical_bytes == 17 * UNIT


def test_memory_that_somebody_views_is_neither_lent_nor_changed() -> None:
    arena = Arena(8 * UNIT)
    loan = arena.take(8 * UNIT)
    fill(loan, 7)
    view = loan[UNIT : 2 * UNIT]
    loan = arena.give_back(loan, [Span(4 * UNIT, 8 * UNIT)])
    loan = arena.give_back(loan, [Span(0, 4 * UNIT)])
    assert arena.held_bytes == 8 * UNIT
    with pytest.raises(NoRoom):
        arena.take(UNIT)
    assert is_filled(view, 7)
    del view, loan
    assert arena.held_bytes == 0
    fill(arena.take(8 * UNIT), 8)


def test_many_parts_given_back_under_one_view_come_back_without_recursion() -> None:
    arena = Arena(5000 * UNIT)
    loan = arena.take(5000 * UNIT)
    view = loan[:1]
    for at in range(5000):
        loan = arena.give_back(loan, [Span(at * UNIT, (at + 1) * UNIT)])
    assert arena.held_bytes == 5000 * UNIT
    del view, loan
    assert arena.held_bytes == 0


def test_no_run_of_free_places_long_enough_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetree.memory.arena._TIMES", 1)
    arena = Arena(8 * UNIT)
    first, middle, last = (arena.take(size * UNIT) for size in (3, 2, 3))
    first = arena.give_back(first, [Span(0, 3 * UNIT)])
    last = arena.give_back(last, [Span(0, 3 * UNIT)])
    del first, last
    with pytest.raises(NoRoom, match="no run"):
        arena.take(6 * UNIT)
    middle = arena.give_back(middle, [Span(0, 2 * UNIT)])
    del middle
    fill(arena.take(8 * UNIT), 1)


def test_the_engines_allocator_and_no_budget_get_plain_memory() -> None:
    assert isinstance(pool_of(0), PlainPool)
    assert isinstance(pool_of((1 << 20) - 1), PlainPool)
    assert isinstance(pool_of(1 << 20, lambda num_bytes: pageable(num_bytes)), PlainPool)
    assert isinstance(pool_of(1 << 20), Arena)
    assert pool_of(1 << 62).file is None, "no such file can be made"


# Slabs give back whole units of dropped pages.


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([256, 1000, 2048, 4096, 6000, 8192]),
    st.sampled_from([512, 4096, 5000]),
    st.permutations(range(12)),
)
def test_a_slab_gives_back_every_unit_of_dropped_pages_once(
    num_pages: int, kv: int, e: int, order: list[int]
) -> None:
    layout = Layout(
        num_pages=num_pages, num_layers=2, e_layers=(1,), kv_page_bytes=kv, e_page_bytes=e
    )
    arena = Arena(1 << 20)
    slab = Slab(layout, arena)
    slab.fill()
    fill(slab.whole, 9)
    kept = set(range(num_pages))
    for page in [page for page in order if page < num_pages]:
        before = slab.num_bytes
        bound = slab.least_bytes([Span(it, it + 1) for it in kept - {page}])
        given = slab.drop_pages(Span(page, page + 1))
        kept.remove(page)
        assert given == before - slab.num_bytes
        assert slab.num_bytes == arena.held_bytes == (oracle_bytes(layout, kept) if kept else 0)
        assert slab.num_bytes <= bound
        for it in kept:
            for part in layout.ranges_of(Span(it, it + 1)):
                assert is_filled(slab.whole[part.start : part.stop], 9)


def oracle_bytes(layout: Layout, kept: set[int]) -> int:
    """Units that hold any byte of a kept page, or of two layers, or end the slab."""
    num_units = -(-layout.num_bytes // UNIT)
    needed = set[int]()
    for whole in layout.ranges_of(Span(0, layout.num_pages)):
        for border in (whole.start, whole.stop):
            if border % UNIT:
                needed.add(border // UNIT)
    for page in kept:
        for part in layout.ranges_of(Span(page, page + 1)):
            needed |= set(range(part.start // UNIT, -(-part.stop // UNIT)))
    return UNIT * len(needed & set(range(num_units)))


LARGE = Family(**{**msgspec.structs.asdict(FAMILY), "num_kv_heads": 64, "head_dim": 64})


def test_a_tree_counts_what_its_arena_holds_page_by_page() -> None:
    page_bytes = LARGE.num_layers * LARGE.kv_page_bytes
    assert LARGE.kv_page_bytes % UNIT == 0
    arena = Arena(8 * page_bytes)
    tree = CacheTree(LARGE, host_bytes=8 * page_bytes, memory=arena)
    store(tree, "abcdefgh")
    tree.add_remote(FAR, MODEL, None, path("ab"), [])  # Splits the node in two.
    lease = tree.lease(MODEL, path("ab"), "test", Deadline.after(60))
    assert lease is not None
    store(tree, "uvwx")  # c to h go, and with them their memory.
    assert [match.num_pages for match in tree.match(path("abcdefgh"))] == [2, 2]
    assert tree.num_bytes == arena.held_bytes == 6 * page_bytes
    store(tree, "yz")
    assert tree.num_bytes == 8 * page_bytes
    assert tree.reserve(MODEL, None, path("0123456"), []) is None, "a, b are leased"
    assert tree.num_bytes == 8 * page_bytes, "and nothing went for it"
    assert arena.physical_bytes == 8 * page_bytes + UNIT
    for layer in range(LARGE.num_layers):
        (view,) = lease.kv(layer)
        assert is_filled(view, 1)
    del view
    lease.release()
    tree.clear()
    assert tree.num_bytes == arena.held_bytes == 0


@pytest.mark.parametrize("blocker", ["an advert", "another model"])
def test_pages_that_contradict_the_tree_give_back_their_own_memory_alone(blocker: str) -> None:
    page_bytes = LARGE.num_layers * LARGE.kv_page_bytes
    arena = Arena(8 * page_bytes)
    tree = CacheTree(LARGE, host_bytes=8 * page_bytes, memory=arena)
    wrong = path("ab")[1:]  # At the root, where it cannot be.
    if blocker == "an advert":
        tree.add_remote(FAR, MODEL, None, wrong, [])
    else:
        other = tree.reserve(ModelId("other"), None, wrong, [])
        assert other is not None
        other.commit()
    store(tree, "abc", mark=7)
    (match,) = tree.match(path("abc"))
    kept = path("abc")[: match.num_pages]
    lease = tree.lease(MODEL, kept, "test", Deadline.after(60))
    assert lease is not None
    for letter in "tuvwxyz":  # Take all that is free.
        store(tree, letter, mark=9)
    assert all(is_filled(view, 7) for layer in range(LARGE.num_layers) for view in lease.kv(layer))
    assert tree.num_bytes == arena.held_bytes


def store(tree: CacheTree, text: str, start: int = 0, mark: int = 1) -> None:
    pages = path(text)
    reservation = tree.reserve(MODEL, pages[start - 1] if start else None, pages[start:], [])
    assert reservation is not None
    fill(reservation.whole(), mark)
    reservation.commit()


def test_a_closed_arena_lends_no_more_and_leaves_no_descriptor() -> None:
    gc.collect()  # What earlier tests left would give its descriptor back in between.
    before = set(Path("/proc/self/fd").iterdir())
    arena = Arena(8 * UNIT)
    loan = arena.take(UNIT)
    fill(loan, 3)
    assert len(set(Path("/proc/self/fd").iterdir()) - before) == 1
    arena.close()
    arena.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert is_filled(loan, 3)
    loan = arena.give_back(loan, [Span(0, UNIT)])
    with pytest.raises(NoRoom):
        arena.take(UNIT)
    base, num_bytes = arena._base, arena.file.num_bytes
    mapped = f"{base:x}-{base + num_bytes:x}"
    assert mapped in Path("/proc/self/maps").read_text()
    del loan, arena
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()
