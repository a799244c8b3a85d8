"""Leases and open reservations: the pages that they keep in the tree, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tree_parts import (
    FAMILY,
    FAR,
    KV,
    KV0,
    KV_PART,
    PAGE,
    A,
    B,
    E,
    FakeTime,
    content,
    far_future,
    has_content,
    leased,
    make_tree,
    num_pages,
    path,
    store,
)

from cachetree.clock import Deadline
from cachetree.errors import StaleEntry
from cachetree.ids import Kind, Part, Span, Step
from cachetree.memory import Arena
from cachetree.memory.slab import Blocks, Loan
from cachetree.tree import CacheTree


def test_a_lease_reads_any_run_of_pages() -> None:
    tree = make_tree()
    store(tree, A, "abc")
    store(tree, A, "abcde", start=3)
    pages = path("abcde")[1:5]
    lease = tree.lease(A, pages, "test", far_future())
    assert lease.num_pages == 4
    assert [len(view) for view in lease.views(KV0)] == [2 * KV, 2 * KV]
    last = Step(Kind.KV, 2)
    assert b"".join(lease.views(last, Span(1, 3))) == content(A, pages[1:3], last)
    with pytest.raises(ValueError, match="exceeds"):
        lease.views(KV0, Span(0, 5))


def test_a_lease_of_pages_that_are_gone_is_none() -> None:
    tree = make_tree()
    store(tree, A, "abc")
    store(tree, B, "abcd")
    assert tree.lease(A, path("abcd"), "test", far_future()) is None
    assert tree.lease(A, path("abx"), "test", far_future()) is None
    assert tree.lease(A, path("x"), "test", far_future()) is None
    # Consecutive means consecutive.
    assert tree.lease(A, [path("abc")[0], path("abc")[2]], "test", far_future()) is None
    tree.remote.add(FAR, A, path("z")[0], path("zz")[1:])
    assert tree.lease(A, path("z"), "test", far_future()) is None


def test_reservation_that_cannot_fit_evicts_nothing() -> None:
    tree = make_tree(4)
    store(tree, A, "ab")
    store(tree, A, "x")
    assert tree.reserve(A, None, path("vwxyz")) is None
    lease = leased(tree, A, "ab")
    assert tree.reserve(A, None, path("uvw")) is None
    assert num_pages(tree, A, "x") == 1
    # Pages that would hang below evictable ones need those to stay.
    lease.release()
    assert tree.reserve(A, path("ab")[1], path("abcde")[2:]) is None
    assert num_pages(tree, A, "ab") == 2


def test_a_leased_page_and_all_before_it_stay() -> None:
    tree = make_tree(4)
    store(tree, A, "ab")
    store(tree, A, "abcd", start=2)
    lease = tree.lease(A, path("abc")[2:], "test", far_future())
    assert tree.reserve(A, None, path("z")) is None
    tree.evict()
    assert num_pages(tree, A, "abcd") == 4
    lease.release()
    with pytest.raises(StaleEntry):
        lease.views(KV0)
    store(tree, A, "z")
    assert num_pages(tree, A, "abcd") == 2


def test_a_lease_on_the_head_of_a_split_node_frees_the_tail() -> None:
    tree = make_tree()
    store(tree, A, "abcd")
    leased(tree, A, "ab")
    store(tree, B, "ab")
    tree.evict()
    assert num_pages(tree, A, "abcd") == 2
    assert num_pages(tree, B, "ab") == 0


def test_a_lease_on_the_tail_of_a_split_node_keeps_the_head() -> None:
    tree = make_tree()
    store(tree, A, "abcd")
    assert tree.lease(A, path("abcd")[2:], "test", far_future()) is not None
    store(tree, B, "ab")
    tree.evict()
    assert num_pages(tree, A, "abcd") == 4


def test_leases_end_at_their_deadline() -> None:
    clock = FakeTime()
    tree = make_tree(2, clock)
    store(tree, A, "ab")
    lease = tree.lease(A, path("ab"), "slow reader", Deadline.after(5, clock))
    clock.now_s = 4.9
    assert tree.reserve(A, None, path("z")) is None
    clock.now_s = 5.0
    view = lease.views(KV0)[0]
    held = bytes(view)
    assert tree.reserve(A, None, path("z")) is None, "all bytes that there are can be seen"
    with pytest.raises(StaleEntry, match="slow reader"):
        lease.views(KV0)
    assert bytes(view) == held  # a view taken before is never overwritten
    del view
    store(tree, A, "z")


class SlowLoan(Loan):
    """A loan that calls `stop` before each access to its memory."""

    __slots__ = ("_memory", "_stop")

    def __init__(self, loan: Loan, stop: Callable[[], None]) -> None:
        self._stop = stop
        super().__init__(loan.memory, loan.runs)

    @property
    def memory(self) -> memoryview:  # type: ignore[override]
        self._stop()
        return self._memory

    @memory.setter
    def memory(self, memory: memoryview) -> None:
        self._memory = memory


class SlowArena(Arena):
    """An arena that calls `meanwhile` once, before the next access to lent memory."""

    meanwhile: Callable[[], None] | None = None

    def take(self, parts: Sequence[Blocks]) -> Loan:
        return SlowLoan(super().take(parts), self._stop)

    def _stop(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_a_lease_that_ends_while_its_views_are_taken_gives_none() -> None:
    clock, memory = FakeTime(), SlowArena(2 * PAGE)
    tree = CacheTree(FAMILY, host_bytes=2 * PAGE, memory=memory, clock=clock)
    store(tree, A, "ab")
    lease = tree.lease(A, path("ab"), "slow reader", Deadline.after(5, clock))

    def pass_on() -> None:
        clock.now_s = 6.0
        store(tree, A, "xy")

    memory.meanwhile = pass_on
    with pytest.raises(StaleEntry, match="slow reader"):
        lease.views(KV0)
    assert num_pages(tree, A, "xy") == 2


def test_e_is_leased_with_its_kv_or_alone_and_neither_goes_meanwhile() -> None:
    tree = make_tree()
    store(tree, A, "ab", e_layers=[1, 2])
    assert tree.lease(A, path("ab"), "test", far_future(), [KV_PART, Part(0)]) is None
    both = leased(tree, A, "ab", 1)
    e = tree.lease(A, path("ab"), "test", far_future(), [Part(2)])
    assert tree.evict() == 0
    assert has_content(both, A, "ab", [1])
    assert b"".join(e.views(Step(Kind.E, 2))) == content(A, path("ab"), Step(Kind.E, 2))
    both.release()
    assert tree.evict() == 2 * E, "KV stays below E that is read"
    e.release()
    assert tree.evict() == 2 * (PAGE + E)


def test_an_open_reservation_keeps_its_parent() -> None:
    tree = make_tree()
    store(tree, A, "ab")
    reservation = tree.reserve(A, path("ab")[1], path("abc")[2:])
    tree.evict()
    assert num_pages(tree, A, "ab") == 2
    reservation.commit()
    assert num_pages(tree, A, "abc") == 3
    tree.evict()
    assert (tree.num_bytes, tree.num_pages) == (0, 0)
