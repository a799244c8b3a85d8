"""Pages that are stored again with E at more layers gain it; what reads them sees no change."""

from __future__ import annotations

from tree_oracle import Memory
from tree_parts import (
    FAMILY,
    FAR,
    PAGE,
    A,
    B,
    E,
    has_content,
    leased,
    make_tree,
    path,
    store,
)

from cachetree.ids import ModelId
from cachetree.tree.entries import Change
from cachetree.tree.tree import CacheTree


def e_pages(tree: CacheTree, model: ModelId, text: str) -> dict[int, int]:
    (found,) = [match for match in tree.match(path(text)) if match.model == model]
    return dict(found.e_pages)


def is_right(tree: CacheTree, model: ModelId, text: str, e_layers: list[int]) -> bool:
    """Of all pages, KV and the E that is said to be there."""
    with leased(tree, model, text) as lease:
        return has_content(lease, model, text, e_layers)


def test_pages_that_are_stored_again_with_more_e_have_it() -> None:
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    store(tree, A, "abxy", start=2, e_layers=[1])
    store(tree, B, "abcd")
    changes: list[Change] = []
    tree.subscribe(changes.append)
    assert store(tree, A, "abcde", e_layers=[0, 1]) == tuple(path("abcde"))
    assert e_pages(tree, A, "abcde") == {0: 5, 1: 5}
    assert e_pages(tree, A, "abxy") == {0: 2, 1: 4}
    assert e_pages(tree, B, "abcd") == {}
    assert is_right(tree, A, "abcde", [0, 1])
    assert is_right(tree, A, "abxy", [1])
    assert [(it.added, it.pages, it.e_layers) for it in changes] == [
        (True, tuple(path("abcde")), (0, 1))
    ]
    assert tree.num_pages == 5 + 2 + 4
    tree.evict()
    assert tree.num_bytes == tree.num_pages == 0


def test_what_adds_no_e_or_would_lose_some_is_skipped() -> None:
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[0, 1])
    for e_layers in ([], [0], [1], [0, 1], [2], [1, 2]):
        assert store(tree, A, "abcd", e_layers=e_layers) == ()
    assert e_pages(tree, A, "abcd") == {0: 4, 1: 4}


def test_pages_with_e_elsewhere_keep_it_and_gain_none_until_they_are_evicted() -> None:
    """Whoever stores them has no E to put beside the new: either would be lost."""
    tree = make_tree()
    store(tree, A, "abc", e_layers=[0, 1])
    assert store(tree, A, "abcd", e_layers=[1, 2]) == tuple(path("abcd")[3:])
    assert e_pages(tree, A, "abcd") == {0: 3, 1: 4}
    assert is_right(tree, A, "abc", [0, 1])
    assert tree.evict(A, path("abcd"))
    assert store(tree, A, "abcd", e_layers=[1, 2]) == tuple(path("abcd"))
    assert e_pages(tree, A, "abcd") == {1: 4, 2: 4}
    assert is_right(tree, A, "abcd", [1, 2])


def test_readers_go_on_and_pins_stay_while_pages_gain() -> None:
    tree = make_tree()
    store(tree, A, "abcd", e_layers=[1])
    lease = leased(tree, A, "abcd")
    assert tree.pin(A, path("abcd")) == {A: 4}
    assert tree.num_pinned_bytes == 4 * (PAGE + E)
    store(tree, A, "abcd", e_layers=[0, 1])
    assert tree.num_pinned_bytes == tree.num_bytes == 4 * (PAGE + 2 * E)
    assert has_content(lease, A, "abcd")
    lease.release()
    assert is_right(tree, A, "abcd", [0, 1])
    tree.evict()
    assert is_right(tree, A, "abcd", [0, 1]), "it is pinned"


def test_readers_go_on_while_their_pages_gain_one_after_the_other() -> None:
    tree = CacheTree(FAMILY, host_bytes=100 * PAGE, memory=Memory())
    store(tree, A, "abcd")
    tree.remote.add(FAR, A, None, path("ab"), [])  # Splits the node in two.
    lease = leased(tree, A, "abcd")
    for start, stop in ((0, 2), (2, 4)):
        assert store(tree, A, "abcd"[:stop], start, e_layers=[1]) == tuple(path("abcd"))[start:stop]
    assert has_content(lease, A, "abcd")


def test_of_two_stores_of_the_same_pages_the_one_with_more_e_stays() -> None:
    for first, second in (([1], [0, 1]), ([0, 1], [1])):
        tree = make_tree()
        stores = [tree.reserve(A, None, path("abc"), e_layers) for e_layers in (first, second)]
        for reservation in stores:
            reservation.commit()
        assert e_pages(tree, A, "abc") == {0: 3, 1: 3}
        assert tree.num_bytes == 3 * (PAGE + 2 * E)


def test_an_advert_with_more_e_is_noted() -> None:
    tree = make_tree()
    tree.remote.add(FAR, A, None, path("abcd"), [1])
    tree.remote.add(FAR, A, None, path("ab"), [0, 1])
    assert e_pages(tree, A, "abcd") == {0: 2, 1: 4}
