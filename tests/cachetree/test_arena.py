"""The arena: lent memory belongs to one borrower, and free bytes can always be lent."""

from __future__ import annotations

import gc
import mmap
import os
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
from cachetree.ids import KV, Span, steps_of
from cachetree.memory.arena import Arena, joined
from cachetree.memory.slab import Blocks, Layout, Loan, NoRoom, Slab
from cachetree.tree.tree import CacheTree

UNIT = mmap.PAGESIZE
MODEL = ModelId("m")


@given(st.sets(st.integers(0, 40)), st.randoms())
def test_free_bytes_are_few_runs(numbers, chance):
    runs = [(number, number + 1) for number in numbers]
    chance.shuffle(runs)
    joint = joined(runs)
    assert [number for run in joint for number in range(*run)] == sorted(numbers)
    assert len(joint) == sum(number - 1 not in numbers for number in numbers)


def fill(loan: memoryview, mark: int) -> None:
    np.frombuffer(loan, np.uint8)[:] = mark


def is_filled(loan: memoryview, mark: int) -> bool:
    return bool((np.frombuffer(loan, np.uint8) == mark).all())


def places_of(loan: Loan) -> list[Span]:
    return [run for runs in loan.runs for run in runs]


def take(arena: Arena, *parts: tuple[int, int]) -> Loan:
    return arena.take([Blocks(*part) for part in parts])


@pytest.mark.parametrize("seed", range(4))
def test_churn_never_lends_twice_and_there_is_room_while_there_are_bytes(seed):
    chance = random.Random(seed)
    budget = 600
    arena = Arena(budget)
    lent: list[tuple[Loan, list[Span], int]] = []
    num_refused = num_torn = 0
    for number in range(4000):
        mark = number % 251
        held = sum(len(place) for _, places, _ in lent for place in places)
        if chance.random() < 0.5:
            parts = [(chance.randrange(20), 4), (chance.randrange(20), 4), (chance.randrange(9), 8)]
            num_bytes = sum(num * size for num, size in parts)
            try:
                loan = take(arena, *parts)
            except NoRoom:
                num_refused += 1
                assert held + num_bytes > budget - budget // 4, "small holes take no large blocks"
            else:
                assert [sum(map(len, runs)) for runs in loan.runs] == [a * b for a, b in parts]
                for runs, (_, size) in zip(loan.runs, parts, strict=True):
                    num_torn += len(runs) > 1
                    assert all(len(run) % size == 0 for run in runs)
                places = places_of(loan)
                for place in places:
                    fill(loan.memory[place.start : place.stop], mark)
                if places:
                    lent.append((loan, places, mark))
        elif lent:
            loan, places, mark = lent.pop(chance.randrange(len(lent)))
            assert all(is_filled(loan.memory[it.start : it.stop], mark) for it in places)
            cut = chance.randrange(len(places))
            arena.give_back(loan, places[cut:])
            if cut:
                lent.append((loan, places[:cut], mark))
            del loan
        assert arena.lent_bytes == sum(len(it) for _, places, _ in lent for it in places)
    assert num_refused and num_torn > 100
    for loan, places, mark in lent:
        assert all(is_filled(loan.memory[it.start : it.stop], mark) for it in places)


def test_all_bytes_can_be_lent_however_they_are_torn():
    arena = Arena(10 * 100)
    loans = [take(arena, (1, 10)) for _ in range(100)]
    for loan in loans[::2]:
        arena.give_back(loan, places_of(loan))
    loan = take(arena, (30, 10), (20, 10))
    assert [len(runs) for runs in loan.runs] == [30, 20]
    assert arena.lent_bytes == 1000


def test_a_loan_lies_in_the_shortest_run_that_takes_it():
    arena = Arena(110)
    loans = [take(arena, (num, 10)) for num in (4, 1, 3, 1, 2)]
    holes = [places_of(loans[at])[0] for at in (0, 2)]
    for at in (0, 2):
        arena.give_back(loans[at], places_of(loans[at]))
    assert [places_of(take(arena, (1, 10), (2, 10)))[0].start] == [holes[1].start]
    again = take(arena, (2, 10), (2, 10))
    assert [len(runs) for runs in again.runs] == [1, 1]
    assert places_of(again)[0].start == holes[0].start


def test_request_without_a_fitting_large_block_takes_small_ones():
    arena = Arena(150)
    loans = [take(arena, (num, 10)) for num in (2, 1, 2, 1, 9)]
    for loan in loans[::2]:
        arena.give_back(loan, places_of(loan))
    del loan, loans[::2]
    take(arena, (4, 10), (2, 30))
    take(arena, (1, 30))
    with pytest.raises(NoRoom):
        take(arena, (1, 10))


def test_memory_that_somebody_views_is_neither_lent_nor_changed():
    arena = Arena(8 * UNIT)
    loan = take(arena, (8, UNIT))
    (place,) = places_of(loan)
    fill(loan.memory[place.start : place.stop], 7)
    view = loan.memory[place.start + UNIT : place.start + 2 * UNIT]
    middle = place.start + 4 * UNIT
    arena.give_back(loan, [Span(middle, place.stop)])
    arena.give_back(loan, [Span(place.start, middle)])
    assert arena.lent_bytes == 8 * UNIT
    with pytest.raises(NoRoom):
        take(arena, (1, UNIT))
    assert is_filled(view, 7)
    del view, loan
    assert arena.lent_bytes == 0
    take(arena, (8, UNIT))


def test_many_parts_given_back_under_one_view_come_back_without_recursion():
    arena = Arena(5000)
    loan = take(arena, (5000, 1))
    (place,) = places_of(loan)
    view = loan.memory[place.start : place.start + 1]
    for at in range(place.start, place.stop):
        arena.give_back(loan, [Span(at, at + 1)])
    assert arena.lent_bytes == 5000
    del view, loan
    assert arena.lent_bytes == 0


def test_no_memory_is_allocated_after_the_start():
    arena = Arena(64 * UNIT)
    length = os.fstat(arena.file.fd).st_size
    loans = [take(arena, (16, UNIT)) for _ in range(4)]
    for loan in loans:
        for place in places_of(loan):
            fill(loan.memory[place.start : place.stop], 1)
    assert os.fstat(arena.file.fd).st_size == length == 65 * UNIT
    assert os.fstat(arena.file.fd).st_blocks * 512 == length


# Slabs.


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.sampled_from([256, 1000, 4096]),
    st.permutations(range(12)),
)
def test_a_slab_gives_back_every_dropped_page_once(num_pages, num_steps, step_bytes, order):
    layout = Layout(num_pages=num_pages, num_steps=num_steps, step_bytes=step_bytes)
    arena = Arena(1 << 20)
    slab = Slab(layout, arena)
    slab.fill()

    def views(page: int) -> list[memoryview]:
        return [
            view for it in steps_of(KV, num_steps) for view in slab.views(it, Span(page, page + 1))
        ]

    left = set(range(num_pages))
    for page in left:
        for view in views(page):
            fill(view, page)
    del view
    for page in [page for page in order if page < num_pages]:
        assert slab.drop_pages(Span(page, page + 1)) == num_steps * step_bytes
        left.remove(page)
        assert slab.num_bytes == arena.lent_bytes == len(left) * num_steps * step_bytes
        assert all(is_filled(view, it) for it in left for view in views(it))


KV_STEPS = steps_of(KV, FAMILY.num_layers)
LARGE = Family(**{**msgspec.structs.asdict(FAMILY), "num_kv_heads": 64, "head_dim": 64})


def test_a_tree_counts_what_its_arena_holds_page_by_page():
    page_bytes = LARGE.num_layers * LARGE.kv_page_bytes
    assert LARGE.kv_page_bytes % UNIT == 0
    arena = Arena(8 * page_bytes)
    tree = CacheTree(LARGE, host_bytes=8 * page_bytes, memory=arena)
    store(tree, "abcdefgh")
    tree.remote.add(FAR, MODEL, None, path("ab"))  # Splits the node in two.
    lease = tree.lease(MODEL, path("ab"), "test", Deadline.after(60))
    store(tree, "uvwx")  # c to h go, and with them their memory.
    assert [match.num_pages for match in tree.match(path("abcdefgh"))] == [2, 2]
    assert tree.num_bytes == arena.lent_bytes == 6 * page_bytes
    store(tree, "yz")
    assert tree.num_bytes == 8 * page_bytes
    assert tree.reserve(MODEL, None, path("0123456")) is None, "a, b are leased"
    assert tree.num_bytes == 8 * page_bytes, "and nothing went for it"
    for step in KV_STEPS:
        (view,) = lease.views(step)
        assert is_filled(view, 1)
    del view
    lease.release()
    tree.evict()
    assert tree.num_bytes == arena.lent_bytes == 0


@pytest.mark.parametrize("blocker", ["an advert", "another model"])
def test_pages_that_contradict_the_tree_give_back_their_own_memory_alone(blocker):
    page_bytes = LARGE.num_layers * LARGE.kv_page_bytes
    arena = Arena(8 * page_bytes)
    tree = CacheTree(LARGE, host_bytes=8 * page_bytes, memory=arena)
    wrong = path("ab")[1:]  # At the root, where it cannot be.
    if blocker == "an advert":
        tree.remote.add(FAR, MODEL, None, wrong)
    else:
        other = tree.reserve(ModelId("other"), None, wrong)
        other.commit()
    store(tree, "abc", mark=7)
    (match,) = tree.match(path("abc"))
    matched = path("abc")[: match.num_pages]
    lease = tree.lease(MODEL, matched, "test", Deadline.after(60))
    for letter in "tuvwxyz":  # Take all that is free.
        store(tree, letter, mark=9)
    assert all(is_filled(view, 7) for step in KV_STEPS for view in lease.views(step))
    assert tree.num_bytes == arena.lent_bytes


def store(tree: CacheTree, text: str, start: int = 0, mark: int = 1) -> None:
    pages = path(text)
    reservation = tree.reserve(MODEL, pages[start - 1] if start else None, pages[start:])
    for step in reservation.steps:
        for view in reservation.views(step):
            fill(view, mark)
    del view
    reservation.commit()


def test_a_closed_arena_lends_no_more_and_leaves_no_descriptor():
    gc.collect()  # What earlier tests left would give its descriptor back in between.
    before = set(Path("/proc/self/fd").iterdir())
    arena = Arena(8 * UNIT)
    loan = take(arena, (1, UNIT))
    (place,) = places_of(loan)
    view = loan.memory[place.start : place.stop]
    fill(view, 3)
    assert len(set(Path("/proc/self/fd").iterdir()) - before) == 1
    arena.close()
    arena.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert is_filled(view, 3)
    arena.give_back(loan, [place])
    with pytest.raises(NoRoom):
        take(arena, (1, UNIT))
    base, num_bytes = arena._base, arena.file.num_bytes
    mapped = f"{base:x}-{base + num_bytes:x}"
    assert mapped in Path("/proc/self/maps").read_text()
    del loan, view, arena
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()
