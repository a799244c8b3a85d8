"""Orders to the tree about entries, and its answers; leases and open reservations, and for how long
they keep pages in the tree."""

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
    advertise,
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
from cachetree.ids import DISK, Kind, PageHash, Part, Span, Step
from cachetree.memory import Arena
from cachetree.memory.slab import Blocks, Loan
from cachetree.tree import CacheTree
from cachetree.tree.entries import Change


@pytest.mark.parametrize(
    ("model", "text", "left", "num_evictions"),
    [
        (A, "abc", (1, 3), 1),
        (None, "abc", (1, 1), 2),
        (A, "ab", (1, 3), 1),
        (B, "", (3, 0), 3),
        (None, "", (0, 0), 6),
    ],
)
def test_evicting_a_prefix_removes_its_pages_of_one_model_or_of_all(
    model, text, left, num_evictions
):
    """Pages that another text also begins with stay."""
    tree = make_tree()
    for each in (A, B):
        store(tree, each, "a")
        store(tree, each, "abc", start=1)
        store(tree, each, "ax", start=1)
    before = tree.num_bytes
    assert before == 8 * PAGE
    freed = tree.evict(model, path(text))
    assert (num_pages(tree, A, "abc"), num_pages(tree, B, "abc")) == left
    assert freed == before - tree.num_bytes
    assert freed == (2 * num_evictions if text else 4 * num_evictions // 3) * PAGE
    assert tree.num_evictions == num_evictions


def test_pages_that_are_no_prompt_are_compared_one_by_one():
    tree = make_tree()
    for model, text in ((A, "ax"), (A, "by"), (B, "by")):
        store(tree, model, text)
    mixed = [path("b")[0], path("ax")[1]]
    assert tree.num_there(mixed) == 1
    assert tree.evict(None, mixed) == 0
    tree.match(mixed)  # It may find too many, and raises nothing.
    assert tree.num_pages == 6


def test_a_store_of_pages_that_are_no_prompt_leaves_nothing_behind():
    """The store's pages may be at another place by the time it ends."""
    tree = make_tree()
    store(tree, A, "a", e_layers=[1])
    store(tree, A, "ax", start=1)
    wrong = [PageHash(b"g" * 16), path("ax")[1]]
    known = tree.reserve(A, None, wrong)
    e = tree.reserve(A, None, wrong, Part(1))
    assert not e.pages, "their KV is not here"
    open_one = tree.reserve(A, None, [PageHash(b"h" * 16), path("cy")[1]])
    assert open_one is not None
    store(tree, A, "c")
    store(tree, A, "cy", start=1)
    for reservation in (known, open_one, e):
        reservation.commit()
    assert [num_pages(tree, A, text) for text in ("ax", "cy")] == [2, 2]
    assert tree.held_bytes == 0
    tree.evict()
    assert tree.num_bytes == 0


@pytest.mark.parametrize("is_advertised", [False, True])
def test_store_with_a_repeated_page_keeps_the_pages_before_it(is_advertised):
    tree = make_tree()
    if is_advertised:
        tree.remote.add(FAR, B, None, path("yz"))
    reservation = tree.reserve(A, None, [*path("yz"), *path("y")])
    assert reservation is not None
    reservation.commit()
    assert (num_pages(tree, A, "yz"), tree.num_bytes) == (2, 2 * PAGE)


def test_a_commit_that_fails_keeps_what_it_published_and_nothing_else():
    tree = make_tree()
    store(tree, A, "a", e_layers=[1])

    def listen(change: Change) -> None:
        raise RuntimeError("a listener that is broken")

    _, leave = tree.subscribe(listen)
    with pytest.raises(RuntimeError):
        store(tree, A, "ab")
    leave()
    assert num_pages(tree, A, "ab") == 2
    with leased(tree, A, "ab") as lease:
        assert has_content(lease, A, "ab")
    assert tree.held_bytes == 0
    tree.evict()
    assert tree.num_bytes == 0


def test_no_pages_can_be_leased_too():
    lease = make_tree().lease(A, [], "a test", far_future())
    assert lease.num_pages == 0


def test_tree_says_how_much_of_a_path_a_model_has():
    tree = make_tree()
    store(tree, A, "ab", e_layers=[1])
    store(tree, A, "abcd", start=2)
    pages = path("abcde")
    assert [tree.has(A, page) for page in pages] == [True] * 4 + [False]
    assert not tree.has(B, pages[0])
    assert not tree.remote.has(DISK, A, pages[0])
    tree.remote.add(DISK, A, None, pages[:2])
    assert [tree.remote.has(DISK, A, page) for page in pages] == [True] * 2 + [False] * 3
    assert tree.line(A, pages[2]) == [
        Change(added=True, model=A, parent=None, pages=tuple(pages[:2])),
        Change(added=True, model=A, parent=pages[1], pages=tuple(pages[2:4])),
    ]
    e = Change(added=True, model=A, part=Part(1), parent=None, pages=tuple(pages[:2]))
    assert tree.line(A, pages[0], Part(1)) == [e]
    assert tree.line(A, pages[4]) == tree.line(B, pages[0]) == []


def test_subscriber_hears_of_stored_entries_until_it_leaves():
    tree = make_tree()
    store(tree, A, "a")
    heard: list[Change] = []
    entries, leave = tree.subscribe_kept(heard.append)
    first, second = (
        Change(added=True, model=A, parent=None, pages=(page,))
        for page in (path("a")[0], path("b")[0])
    )
    assert list(entries) == [first]
    store(tree, A, "b")
    assert heard == [second]
    leave()
    store(tree, A, "c")
    assert heard == [second]


def test_subscriber_hears_of_the_disk_and_not_of_peers():
    tree, pages = make_tree(), path("ab")
    heard: list[Change] = []
    tree.subscribe_kept(heard.append)
    tree.remote.add(FAR, A, None, pages)
    assert not heard, "a peer has said it"
    tree.remote.add(DISK, A, None, pages)
    tree.remote.drop(DISK, A, pages)
    assert [(it.added, it.pages) for it in heard] == [(True, tuple(pages)), (False, tuple(pages))]


def test_subscriber_hears_that_e_left_although_the_pages_are_on_disk():
    tree = make_tree()
    heard: list[Change] = []
    tree.subscribe_kept(heard.append)
    for text, e_layers in (("ab", [1]), ("x", [0])):
        store(tree, A, text, e_layers=e_layers)
        advertise(tree, DISK, A, text, *(e_layers if text == "x" else []))
    heard.clear()
    tree.evict()
    ab = tuple(path("ab"))
    assert heard == [Change(added=False, model=A, part=Part(1), parent=None, pages=ab)]


def test_a_lease_reads_any_run_of_pages():
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


def test_a_lease_of_pages_that_are_gone_is_none():
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


def test_reservation_that_cannot_fit_evicts_nothing():
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


def test_leases_end_at_their_deadline():
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


def test_a_lease_that_ends_while_its_views_are_taken_gives_none():
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


def test_e_is_leased_with_its_kv_or_alone_and_neither_goes_meanwhile():
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
