"""The tree, in one situation per test: its pages, their holders, and its changes."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from tree_parts import (
    FAMILY,
    FAR,
    FARTHER,
    KV0,
    KV_PART,
    PAGE,
    A,
    B,
    E,
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
from cachetree.ids import DISK, LOCAL, Kind, ModelId, PageHash, Part, Span, Step
from cachetree.memory import Arena, Blocks, Loan
from cachetree.planning.plan import Match
from cachetree.tree.entries import Change, Node
from cachetree.tree.tree import CacheTree


def test_match_reports_the_longest_prefix_per_model_and_location():
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    store(tree, B, "abx")
    advertise(tree, FAR, B, "abc", 0, 2)
    assert sorted(tree.match(path("abcz")), key=lambda m: (m.location, m.model)) == [
        Match(model=A, location=LOCAL, num_pages=3, e_pages={1: 3}),
        Match(model=B, location=LOCAL, num_pages=2, e_pages={}),
        Match(model=B, location=FAR, num_pages=3, e_pages={0: 3, 2: 3}),
    ]
    assert tree.match(path("z")) == []
    assert tree.match([]) == []


def test_stored_e_comes_beside_its_kv_and_takes_room_for_itself_only():
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    store(tree, A, "abxy", start=2, e_layers=[1])
    store(tree, B, "abcd")
    before = tree.num_bytes
    changes: list[Change] = []
    tree.subscribe(changes.append)
    assert store(tree, A, "abcde", e_layers=[0]) == tuple(path("abcde"))
    assert tree.num_bytes == before + PAGE + 5 * E
    expected = (A, "abcde", {0: 5, 1: 4}), (A, "abxy", {0: 2, 1: 4}), (B, "abcd", {})
    for model, text, e_pages in expected:
        assert [it.e_pages for it in tree.match(path(text)) if it.model == model] == [e_pages]
    for text, layer in (("abcde", 0), ("abxy", 1)):
        with leased(tree, A, text, layer) as lease:
            assert has_content(lease, A, text, [layer])
    assert [(it.added, it.part, it.pages) for it in changes] == [
        (True, KV_PART, tuple(path("abcde")[4:])),
        (True, Part(0), tuple(path("abcde"))),
    ]
    assert tree.num_pages == 5 + 2 + 4
    tree.evict()
    assert tree.num_bytes == tree.num_pages == 0


@pytest.mark.parametrize("num_before", [0, 40])
def test_known_pages_of_a_new_prompt_are_found_by_halving(num_before, monkeypatch):
    tree = make_tree(num_pages=200)
    prompt = [PageHash(bytes([it]) * 16) for it in range(200)]
    for stop in range(1, 101):  # A node each.
        parent = prompt[stop - 2] if stop > 1 else None
        tree.reserve(A, parent, prompt[stop - 1 : stop]).commit()
    compared: list[Node] = []
    num_common = Node.num_common
    monkeypatch.setattr(
        Node, "num_common", lambda self, *rest: compared.append(self) or num_common(self, *rest)
    )
    parent = prompt[num_before - 1] if num_before else None
    reservation = tree.reserve(A, parent, prompt[num_before:])
    reservation.commit()
    assert (reservation.skipped, len(reservation.pages)) == (100 - num_before, 100)
    assert tree.match(prompt)[0].num_pages == 200
    assert len(compared) < 3


def test_a_reservation_is_invisible_until_it_is_committed():
    tree = make_tree()
    reservation = tree.reserve(A, None, path("ab"))
    assert tree.num_bytes == 2 * PAGE
    assert tree.match(path("ab")) == []
    reservation.commit()
    assert num_pages(tree, A, "ab") == 2
    with pytest.raises(RuntimeError):
        reservation.commit()
    with pytest.raises(RuntimeError):
        reservation.views(KV0)


def test_a_released_or_abandoned_reservation_gives_its_bytes_back():
    tree = make_tree()
    reservation = tree.reserve(A, None, path("ab"))
    reservation.release()
    reservation.release()
    assert tree.num_bytes == 0
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with tree.reserve(A, None, path("ab")) or pytest.fail("no room"):
            _ = 1 // 0
    assert tree.num_bytes == 0
    assert tree.match(path("ab")) == []


def test_a_failed_allocation_leaves_nothing_behind():
    class Broken(Arena):
        def take(self, parts: Sequence[Blocks]) -> Loan:
            raise MemoryError(parts)

    tree = CacheTree(FAMILY, host_bytes=100 * PAGE, memory=Broken(100 * PAGE))
    with pytest.raises(MemoryError):
        tree.reserve(A, None, path("ab"))
    assert tree.num_bytes == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="E at layer 3"):
        make_tree().reserve(A, None, path("a"), Part(3))
    with pytest.raises(ValueError, match="not advertised"):
        make_tree().remote.add(LOCAL, A, None, path("a"))


def test_a_split_keeps_every_byte_and_copies_none():
    lent: list[int] = []

    class Counting(Arena):
        def take(self, parts: Sequence[Blocks]) -> Loan:
            lent.append(sum(part.num * part.size for part in parts))
            return super().take(parts)

    tree = CacheTree(FAMILY, host_bytes=100 * PAGE, memory=Counting(100 * PAGE))
    store(tree, A, "abcdef", e_layers=[2])
    whole = leased(tree, A, "abcdef").views(KV0)
    store(tree, B, "abxy")
    store(tree, B, "abcd", start=2)
    assert lent == [6 * PAGE, 6 * E, 4 * PAGE, 2 * PAGE]
    after = leased(tree, A, "abcdef", 2)
    assert has_content(after, A, "abcdef", [2])
    # The pieces still lie side by side, so they move as one frame.
    assert len(after.views(KV0)) == 1
    after.views(KV0)[0][:1] = b"!"
    assert whole[0][0] == ord("!")
    e = Step(Kind.E, 2)
    assert b"".join(after.views(e, Span(1, 5))) == content(A, path("abcdef")[1:5], e)
    with pytest.raises(ValueError, match="layer=1"):
        after.views(Step(Kind.E, 1))


def test_a_miss_does_not_wait_for_the_lock():
    tree = make_tree()
    store(tree, A, "a")
    with tree._lock:
        assert tree.match(path("z")) == []


def test_pages_in_the_middle_of_another_path_are_not_a_hit():
    tree = make_tree()
    store(tree, A, "abcdefgh")
    store(tree, A, "abxy", start=2)
    pages = path("abcdefgh")
    assert tree.match([*pages[:3], *pages[6:]])[0].num_pages == 3
    # Hashes that are no chain may match, as the last one speaks for all, but are never read.
    assert tree.lease(A, [*pages[:3], *path("abxy")[3:]], "test", far_future()) is None


def test_adverts_that_could_never_match_hide_nothing():
    tree = make_tree()
    store(tree, A, "abc")
    tree.remote.add(FAR, A, path("ab")[1], path("abc")[2:])  # no parent there
    tree.remote.add(FAR, A, None, path("abc")[1:])  # page b is not at the root
    tree.remote.add(FAR, A, None, [*path("x"), *path("ab")])  # a is not after x
    tree.remote.add(FARTHER, A, None, path("y") * 2)
    assert [(m.location, m.num_pages) for m in tree.match(path("abc"))] == [(LOCAL, 3)]
    assert num_pages(tree, A, "x", FAR) == 1
    leased(tree, A, "abc")
    assert tree.match(path("y") * 2)[0].num_pages == 1


def test_no_advert_keeps_a_page_out_that_is_here():
    tree = make_tree()
    store(tree, A, "ab")
    tree.remote.add(FAR, B, None, path("x"))
    tree.remote.add(FAR, B, path("x")[0], [path("abcd")[3], path("abc")[2]])
    tree.remote.add(FARTHER, B, None, path("abcdef")[5:])
    store(tree, A, "abcdef")
    assert num_pages(tree, A, "abcdef") == 6
    with leased(tree, A, "abcdef") as lease:
        assert has_content(lease, A, "abcdef")
    assert num_pages(tree, B, "x", FAR) == 1, "what is not contradicted stays"
    tree.remote.add(FAR, B, None, path("abcdef")[4:])
    assert num_pages(tree, A, "abcdef") == 6


@pytest.mark.parametrize("order", [(FAR, FARTHER, DISK), (DISK, FARTHER, FAR)])
@pytest.mark.parametrize(
    "lie",
    [
        path("abcd")[2:3],
        [*path("x"), path("abcd")[3]],
        [*path("xy"), *path("abcd")[2:]],  # At the right depth.
        [*path("a"), *path("x"), *path("abcd")[2:]],
    ],
)
def test_wrong_advert_hides_nothing_of_other_peers_or_of_the_disk(lie, order):
    tree = make_tree()
    for place in order:
        model, pages = (B, lie) if place == FAR else (A, path("abcd"))
        for part in (KV_PART, Part(1)):
            tree.remote.add(place, model, None, pages, part)
    for place in (FARTHER, DISK):
        assert num_pages(tree, A, "abcd", place) == 4
        assert tree.remote.reach(place, A, path("abcd"), Part(1)) == 4
        tree.remote.add(place, A, path("abcd")[-1], path("abcdef")[4:])
        assert num_pages(tree, A, "abcdef", place) == 6
    tree.remote.forget(FAR)
    tree.remote.drop(FARTHER, A, path("abcd")[2:])
    assert num_pages(tree, A, "abcdef", FARTHER) == 2
    assert num_pages(tree, A, "abcdef", DISK) == 6


def test_peer_has_a_bounded_number_of_models():
    """A match looks at all models, if each of them has one page."""
    tree = make_tree()
    tree.remote.limit(FAR, 1000, max_models=4)
    models = [ModelId(f"{number}") for number in range(10)]
    for model in models:
        tree.remote.add(FAR, model, None, path("ab"))
        tree.remote.add(FARTHER, model, None, path("a"))
    assert sum(match.location == FAR for match in tree.match(path("ab"))) == 4
    assert tree.remote.num_dropped == {FAR: 12}
    assert sum(match.location == FARTHER for match in tree.match(path("ab"))) == 10
    tree.remote.add(FAR, models[0], path("ab")[-1], path("abc")[2:])
    assert num_pages(tree, models[0], "abc", FAR) == 3, "a known model may grow"
    tree.remote.drop(FAR, models[0], path("ab"))
    tree.remote.add(FAR, models[9], None, path("a"))
    assert num_pages(tree, models[9], "a", FAR) == 1, "one that went makes room"


def test_subscribers_learn_of_every_change_in_order():
    tree = make_tree(4)
    store(tree, A, "ab", e_layers=[])
    store(tree, B, "a")
    changes: list[Change] = []
    now, unsubscribe = tree.subscribe(changes.append)
    ab, a = path("ab"), path("a")

    def change(added: bool, model: ModelId, parent: PageHash | None, *pages: PageHash) -> Change:
        return Change(added=added, model=model, parent=parent, pages=pages)

    # The first model's node was split by the second's.
    assert list(now) == [
        change(True, A, None, *a),
        change(True, B, None, *a),
        change(True, A, a[0], ab[1]),
    ]
    store(tree, A, "abc", start=2)
    store(tree, A, "z")
    assert changes == [
        change(True, A, ab[1], path("abc")[2]),
        change(False, B, None, *a),
        change(True, A, None, *path("z")),
    ]
    unsubscribe()
    unsubscribe()
    tree.evict()
    assert len(changes) == 3


def test_a_long_conversation_does_not_exhaust_the_stack():
    tree = make_tree(3000)
    pages = [PageHash(i.to_bytes(16, "big")) for i in range(2500)]
    for i, page in enumerate(pages):
        reservation = tree.reserve(A, pages[i - 1] if i else None, [page])
        reservation.commit()
    assert tree.match(pages)[0].num_pages == 2500
    assert len(list(tree.subscribe(lambda change: None)[0])) == 2500
    tree.remote.forget(FAR)
    tree.evict()
    assert tree.num_bytes == 0


def test_a_match_copies_no_hashes():
    """Blocks as large as a prompt's hashes come from the heap, which may take any time."""
    tree = make_tree(3000)
    pages = [PageHash(i.to_bytes(16, "big")) for i in range(2000)]
    reservation = tree.reserve(A, None, pages)
    reservation.commit()
    question = [*pages[:1501], *path("x" * 499)]
    tree.match(question)
    tracemalloc.start()
    try:
        assert tree.match(question)[0].num_pages == 1501
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()


def test_threads_share_one_tree():
    # What is given back is not lent again while another thread still has a view of it.
    tree = CacheTree(FAMILY, host_bytes=40 * PAGE, memory=Arena(80 * PAGE))
    errors: list[BaseException] = []

    def use(model: ModelId, letters: str) -> None:
        try:
            for i in range(200):
                text = letters[i % 3] + letters[i % 5] + letters[i % 7]
                store(tree, model, text)
                lease = tree.lease(model, path(text), "thread", Deadline.after(10))
                if lease is not None:
                    with lease:
                        assert has_content(lease, model, text)
                assert tree.num_bytes <= tree.host_bytes
        except BaseException as exc:  # noqa: BLE001  handed to the main thread
            errors.append(exc)

    threads = [
        threading.Thread(target=use, args=(model, letters))
        for model in (A, B)
        for letters in ("abcdefg", "gfedcba")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tree.evict()
    assert tree.num_bytes == 0


def test_how_far_a_location_reaches_is_no_use():
    tree = CacheTree(FAMILY, host_bytes=100 * PAGE)
    store(tree, A, "abcde")
    tree.remote.add(FAR, B, None, path("abc"))
    for text, reach in (("abc", 3), ("abcde", 3), ("ab", 2), ("axc", 1), ("x", 0), ("", 0)):
        assert tree.remote.reach(FAR, B, path(text)) == reach
    assert tree.remote.reach(FAR, A, path("abc")) == tree.remote.reach(FARTHER, B, path("abc")) == 0


def test_after_splits_a_lease_keeps_its_pages_and_no_others():
    tree = make_tree()
    store(tree, A, "abcd")
    with leased(tree, A, "abc") as lease:
        store(tree, A, "abxy", start=2)
        store(tree, A, "abcz", start=3)
        tree.evict()
        assert num_pages(tree, A, "abcd") == tree.num_pages == 3
        assert has_content(lease, A, "abc")


@pytest.mark.parametrize("is_leased", [False, True])
def test_free_memory_in_too_small_holes_is_joined_by_more_evictions(is_leased):
    """A hole of one page's KV has no room for the E of one page."""
    wide = msgspec.structs.replace(FAMILY, hidden_size=PAGE // 2 + 1)
    tree = CacheTree(wide, host_bytes=6 * PAGE)
    for letter in "abcdef":
        store(tree, A, letter)
    leases = [leased(tree, A, it) for it in "def" if is_leased]
    tree.evict(A, path("a"))
    tree.evict(A, path("c"))
    reservation = tree.reserve(A, None, path("b"), Part(0))
    assert (reservation is None) == is_leased
    assert [num_pages(tree, A, it) for it in "abcdef"] == [0, 1, 0, *[is_leased] * 2, 1]
    for each in (*leases, *[reservation] * (not is_leased)):
        each.release()
    tree.evict()
    assert tree.num_bytes == 0


def test_a_page_that_is_elsewhere_in_the_tree_is_not_stored_again():
    """Only a caller that names another parent for a page's hash does this."""
    tree = make_tree()
    store(tree, A, "abc")
    store(tree, B, "a")
    with tree.reserve(B, path("a")[-1], path("abc")[2:]) as reservation:
        reservation.commit()
    assert (num_pages(tree, A, "abc"), num_pages(tree, B, "abc"), tree.num_pages) == (3, 1, 4)
    tree.evict()
    assert tree.num_bytes == tree.num_pages == 0
