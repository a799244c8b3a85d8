"""The tree, in one situation per test: its pages, their holders, and its changes."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence

import pytest
from tree_parts import (
    FAMILY,
    FAR,
    FARTHER,
    KV,
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


def test_match_reports_the_longest_prefix_per_model_and_location() -> None:
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


def test_e_is_kept_only_without_a_gap_from_the_first_page() -> None:
    tree = make_tree()
    store(tree, A, "ab", e_layers=[1, 2])
    store(tree, A, "abc", start=2, e_layers=[1])
    store(tree, A, "abcd", start=3, e_layers=[1])
    assert tree.reserve(A, path("abc")[-1], path("abcd")[3:], Part(2)) is None
    assert tree.match(path("abcd"))[0].e_pages == {1: 4, 2: 2}


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


def test_a_reservation_is_invisible_until_it_is_committed() -> None:
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


def test_a_released_or_abandoned_reservation_gives_its_bytes_back() -> None:
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


def test_a_failed_allocation_leaves_nothing_behind() -> None:
    class Broken(Arena):
        def take(self, parts: Sequence[Blocks]) -> Loan:
            raise MemoryError(parts)

    tree = CacheTree(FAMILY, host_bytes=100 * PAGE, memory=Broken(100 * PAGE))
    with pytest.raises(MemoryError):
        tree.reserve(A, None, path("ab"))
    assert tree.num_bytes == 0


def test_pages_that_the_model_has_are_skipped() -> None:
    tree = make_tree()
    store(tree, A, "ab")
    reservation = tree.reserve(A, None, path("abcd"))
    assert (reservation.skipped, list(reservation.pages)) == (2, path("abcd")[2:])
    assert sum(it.nbytes for it in reservation.views(KV0)) == 2 * KV
    reservation.release()
    nothing = tree.reserve(A, None, path("ab"))
    assert (nothing.skipped, nothing.pages) == (2, ())
    nothing.commit()
    assert tree.num_bytes == 2 * PAGE


def test_an_orphan_is_refused() -> None:
    tree = make_tree()
    assert tree.reserve(A, path("a")[0], path("ab")[1:]) is None
    store(tree, B, "a")
    assert tree.reserve(A, path("a")[0], path("ab")[1:]) is None


def test_e_at_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="E at layer 3"):
        make_tree().reserve(A, None, path("a"), Part(3))


def test_two_reservations_of_the_same_pages_become_one_entry() -> None:
    tree = make_tree()
    first = tree.reserve(A, None, path("ab"))
    second = tree.reserve(A, None, path("abc"))
    first.commit()
    second.commit()
    assert num_pages(tree, A, "abc") == 3
    assert tree.num_pages == 3
    assert tree.num_bytes == 3 * PAGE, "what both had is there once"
    tree.evict()
    assert tree.num_bytes == 0


def test_a_split_keeps_every_byte_and_copies_none() -> None:
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


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    tree = make_tree(6)
    store(tree, A, "ab")
    store(tree, A, "abc", start=2)
    store(tree, A, "x")
    store(tree, A, "y")
    assert num_pages(tree, A, "abc") == 3  # a use: now x is the oldest
    store(tree, A, "uvw")  # 2 pages must go: x, y
    assert [num_pages(tree, A, text) for text in ("abc", "x", "y", "uvw")] == [3, 0, 0, 3]
    store(tree, A, "s")  # then the leaf c, although a and b are as old
    assert [num_pages(tree, A, text) for text in ("abc", "uvw", "s")] == [2, 3, 1]
    assert tree.num_bytes == 6 * PAGE


def test_a_page_was_used_when_what_hung_below_it_was() -> None:
    tree = make_tree(4)
    store(tree, A, "a")
    store(tree, A, "ab", start=1)
    store(tree, A, "ac", start=1)
    store(tree, A, "x")
    leases = [tree.lease(A, path(text), "test", far_future()) for text in ("ab", "x")]
    assert num_pages(tree, A, "ac") == 2  # after the leases
    store(tree, A, "y")  # ac must go, as nothing else may
    assert num_pages(tree, A, "ac") == 1
    for lease in leases:
        lease.release()
    store(tree, A, "y")
    store(tree, A, "st")  # then ab and x, for a was used with ac
    assert [num_pages(tree, A, text) for text in ("ab", "x", "y", "st")] == [1, 0, 1, 2]


def test_a_miss_does_not_wait_for_the_lock() -> None:
    tree = make_tree()
    store(tree, A, "a")
    with tree._lock:
        assert tree.match(path("z")) == []


def test_pages_in_the_middle_of_another_path_are_not_a_hit() -> None:
    tree = make_tree()
    store(tree, A, "abcdefgh")
    store(tree, A, "abxy", start=2)
    pages = path("abcdefgh")
    assert tree.match([*pages[:3], *pages[6:]])[0].num_pages == 3
    # Hashes that are no chain may match, as the last one speaks for all, but are never read.
    assert tree.lease(A, [*pages[:3], *path("abxy")[3:]], "test", far_future()) is None


def test_eviction_of_one_model_leaves_the_others() -> None:
    tree = make_tree(4)
    store(tree, A, "ab")
    store(tree, B, "ab")
    leased(tree, B, "ab")
    store(tree, B, "z")
    assert [num_pages(tree, model, "ab") for model in (A, B)] == [0, 2]


def test_bytes_come_back_with_each_page_that_goes() -> None:
    tree = make_tree(4)
    store(tree, A, "abcd")
    tree.remote.add(FAR, B, None, path("ab"))  # splits the node in two
    assert tree.num_bytes == 4 * PAGE
    store(tree, A, "z")
    assert num_pages(tree, A, "abcd") == 2
    assert tree.num_bytes == 3 * PAGE


def test_remote_entries_hold_no_bytes_and_go_as_they_came() -> None:
    tree = make_tree()
    advertise(tree, FAR, A, "abcd", 1)
    tree.remote.add(FARTHER, A, None, path("ab"))
    tree.remote.add(FAR, A, path("abcd")[3], path("abcdef")[4:])
    assert tree.num_bytes == 0
    assert num_pages(tree, A, "abcdef", FAR) == 6
    tree.remote.drop(FAR, A, path("abcdef")[5:])
    assert num_pages(tree, A, "abcdef", FAR) == 5
    tree.remote.drop(FAR, A, path("abcdef")[1:3])  # what hangs below goes too
    assert num_pages(tree, A, "abcdef", FAR) == 1
    assert num_pages(tree, A, "abcdef", FARTHER) == 2
    tree.remote.forget(FARTHER)
    assert tree.match(path("abcdef")) == [Match(model=A, location=FAR, num_pages=1, e_pages={1: 1})]
    tree.remote.forget(FAR)
    assert tree.match(path("abcdef")) == []
    with pytest.raises(ValueError, match="not advertised"):
        tree.remote.add(LOCAL, A, None, path("a"))


def test_adverts_that_could_never_match_hide_nothing() -> None:
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


@pytest.mark.parametrize("head", ["abx", "xyz"])
def test_an_advert_of_pages_after_others_is_no_way_to_them(head: str) -> None:
    """The advert names the right depth of page d, but wrong pages before it."""
    tree = make_tree()
    store(tree, A, "ab")
    store(tree, A, "abx")
    tree.remote.add(FAR, B, None, path(head))
    tree.remote.add(FAR, B, path(head)[-1], path("abcd")[3:])
    for text, num in (("abcd", 2), ("abcdef", 2), ("abxy", 3)):
        assert num_pages(tree, A, text) == num


def test_no_advert_of_other_pages_first_hides_those_that_are_here() -> None:
    """The advert says that c and d follow x. Their depth is right."""
    tree = make_tree()
    store(tree, A, "a")
    store(tree, A, "ab")
    tree.remote.add(FAR, B, None, path("a"))
    tree.remote.add(FAR, B, path("a")[0], [path("x")[0], *path("abcd")[2:]])
    for text in ("abc", "abcd", "abcdef"):
        assert num_pages(tree, A, text) == 2


def test_an_advert_after_pages_that_were_stored_together_is_no_way_to_all_of_them() -> None:
    """Pages b and x are one node, and only b is right."""
    tree = make_tree()
    store(tree, A, "a")
    store(tree, A, "abx")
    tree.remote.add(FAR, B, None, path("abx"))
    tree.remote.add(FAR, B, path("abx")[-1], path("abcde")[3:])
    for text, num in (("abcd", 2), ("abcde", 2), ("abcdef", 2), ("abxy", 3)):
        assert num_pages(tree, A, text) == num


def test_no_advert_keeps_a_page_out_that_is_here() -> None:
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


def test_wrong_advert_hides_nothing_that_is_stored_and_leased() -> None:
    tree = make_tree()
    tree.remote.add(FAR, A, None, [path("ab")[1], path("abc")[2]])
    store(tree, A, "abc")
    store(tree, A, "abcd", start=3)
    assert num_pages(tree, A, "abcd") == 4
    assert tree.pin(A, path("abc")) == {A: 3}
    with leased(tree, A, "abcd") as lease:
        assert has_content(lease, A, "abcd")


def test_peer_has_a_bounded_number_of_models() -> None:
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


def test_subscribers_learn_of_every_change_in_order() -> None:
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


def test_a_long_conversation_does_not_exhaust_the_stack() -> None:
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


def test_a_match_copies_no_hashes() -> None:
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


def test_threads_share_one_tree() -> None:
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


def test_how_far_a_location_reaches_is_no_use() -> None:
    tree = CacheTree(FAMILY, host_bytes=100 * PAGE)
    store(tree, A, "abcde")
    tree.remote.add(FAR, B, None, path("abc"))
    for text, reach in (("abc", 3), ("abcde", 3), ("ab", 2), ("axc", 1), ("x", 0), ("", 0)):
        assert tree.remote.reach(FAR, B, path(text)) == reach
    assert tree.remote.reach(FAR, A, path("abc")) == tree.remote.reach(FARTHER, B, path("abc")) == 0
