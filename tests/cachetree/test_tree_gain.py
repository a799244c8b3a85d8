"""Pages in memory gain E. E is an entry of its own beside its KV, and leaves before it."""

from __future__ import annotations

from tree_parts import (
    FAR,
    PAGE,
    A,
    B,
    E,
    advertise,
    has_content,
    leased,
    make_tree,
    path,
    store,
)

from cachetree.ids import KV, ModelId, Part
from cachetree.tree.entries import Change
from cachetree.tree.tree import CacheTree


def e_pages(tree: CacheTree, model: ModelId, text: str) -> dict[int, int]:
    (matching,) = [match for match in tree.match(path(text)) if match.model == model]
    return dict(matching.e_pages)


def is_right(tree: CacheTree, model: ModelId, text: str, *e_layers: int) -> bool:
    """Whether KV and E of all pages have the right content."""
    with leased(tree, model, text, *e_layers) as lease:
        return has_content(lease, model, text, e_layers)


def test_stored_e_comes_beside_its_kv_and_takes_room_for_itself_only() -> None:
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    store(tree, A, "abxy", start=2, e_layers=[1])
    store(tree, B, "abcd")
    before = tree.num_bytes
    changes: list[Change] = []
    tree.subscribe(changes.append)
    assert store(tree, A, "abcde", e_layers=[0]) == tuple(path("abcde"))
    assert tree.num_bytes == before + PAGE + 5 * E
    assert e_pages(tree, A, "abcde") == {0: 5, 1: 4}
    assert e_pages(tree, A, "abxy") == {0: 2, 1: 4}
    assert e_pages(tree, B, "abcd") == {}
    assert is_right(tree, A, "abcde", 0)
    assert is_right(tree, A, "abxy", 1)
    assert [(it.added, it.part, it.pages) for it in changes] == [
        (True, KV, tuple(path("abcde")[4:])),
        (True, Part(0), tuple(path("abcde"))),
    ]
    assert tree.num_pages == 5 + 2 + 4
    tree.evict()
    assert tree.num_bytes == tree.num_pages == 0


def test_e_of_pages_whose_kv_is_not_here_is_not_kept() -> None:
    tree = make_tree()
    store(tree, A, "ab")
    reservation = tree.reserve(A, None, path("abcd"), Part(1))
    assert list(reservation.pages) == path("ab")
    reservation.commit()
    assert tree.reserve(B, None, path("ab"), Part(1)).pages == ()
    assert e_pages(tree, A, "abcd") == {1: 2}


def test_kv_stays_while_its_e_is_written() -> None:
    tree = make_tree()
    store(tree, A, "abcd")
    reservation = tree.reserve(A, None, path("ab"), Part(1))
    store(tree, B, "abx")
    assert tree.evict(A) == 2 * PAGE
    reservation.commit()
    assert e_pages(tree, A, "abcd") == {1: 2}
    assert tree.evict(A) == 2 * (PAGE + E)


def test_e_goes_before_its_kv() -> None:
    tree = make_tree(4)
    store(tree, A, "ab", e_layers=[1])
    changes: list[Change] = []
    tree.subscribe(changes.append)
    store(tree, B, "xyz")
    assert [it.part for it in changes if not it.added] == [Part(1), KV]
    assert tree.num_bytes == 3 * PAGE


def test_e_that_is_not_used_goes_and_leaves_kv_that_is() -> None:
    tree = make_tree(4)
    store(tree, A, "ab", e_layers=[1])
    store(tree, B, "x")
    with leased(tree, A, "ab"):
        pass
    assert tree.match(path("x"))
    store(tree, B, "z")
    assert e_pages(tree, A, "ab") == {}
    assert tree.num_bytes == 4 * PAGE


def test_readers_go_on_and_pins_stay_while_pages_gain() -> None:
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    lease = leased(tree, A, "abcd", 1)
    assert tree.pin(A, path("abcd")) == {A: 4}
    assert tree.num_pinned_bytes == 4 * (PAGE + E)
    store(tree, A, "abcd", e_layers=[0])
    assert has_content(lease, A, "abcd", [1])
    lease.release()
    assert is_right(tree, A, "abcd", 0)
    assert tree.evict() == 4 * E, "what came later is not pinned"
    assert is_right(tree, A, "abcd", 1), "it is pinned"


def test_two_stores_of_the_same_e_leave_one() -> None:
    tree = make_tree()
    store(tree, A, "abc")
    stores = [tree.reserve(A, None, path("abc"), Part(1)) for _ in range(2)]
    for reservation in stores:
        reservation.commit()
    assert e_pages(tree, A, "abc") == {1: 3}
    assert tree.num_bytes == 3 * (PAGE + E)


def test_e_that_is_advertised_counts_as_far_as_kv_that_is() -> None:
    tree = make_tree()
    tree.remote.add(FAR, A, None, path("abcd"), Part(1))
    assert tree.match(path("abcd")) == []
    tree.remote.add(FAR, A, None, path("abc"))
    assert e_pages(tree, A, "abcd") == {1: 3}
    advertise(tree, FAR, A, "ab", 0)
    assert e_pages(tree, A, "abcd") == {0: 2, 1: 3}
