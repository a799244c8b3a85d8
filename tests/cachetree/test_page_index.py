"""The index against a plain dict from pages to nodes, with hashes that are alike in part."""

from __future__ import annotations

import random
import struct

import pytest

from cachetree.ids import PageHash
from cachetree.tree.entries import Node
from cachetree.tree.trie import PageIndex

NUM_CROWDED = 64


def some_page(rng: random.Random) -> PageHash:
    """At random; or one of many whose first eight bytes are alike."""
    if rng.random() < 0.7:
        return PageHash(rng.randbytes(16))
    word = rng.randrange(NUM_CROWDED) << rng.choice((0, 32, 58))
    return PageHash(struct.pack("<QQ", word, rng.getrandbits(60)))


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_a_dict_finds(seed: int) -> None:
    rng = random.Random(seed)
    index = PageIndex()
    where: dict[PageHash, tuple[Node, int]] = {}
    nodes: list[Node] = []
    for _ in range(300):
        if rng.random() < 0.6 or not nodes:
            pages = [some_page(rng) for _ in range(rng.randint(1, 60))]
            if rng.random() < 0.2:
                at = rng.randrange(len(pages))
                pages[at] = rng.choice([*where, *pages])
            known = [i for i, it in enumerate(pages) if it in where or it in pages[:i]]
            num_new = known[0] if known else len(pages)
            made = [Node(None, tuple(pages))]
            assert index.put_new(made[0]) == num_new
            if num_new == 0:
                continue
            made[0].cut(num_new)
            cut = rng.randint(0, num_new - 1)
            if cut:
                made.append(made[0].split(cut))
                index.split(*made)
            nodes += made
            where |= {page: (node, i) for node in made for i, page in enumerate(node.pages)}
        else:
            for node in [nodes.pop(rng.randrange(len(nodes))) for _ in range(min(3, len(nodes)))]:
                for page in node.pages:
                    del where[page]
                index.remove(node)
        for page in rng.sample(list(where), min(50, len(where))):
            node, at = where[page]
            assert index.find(page) is node
            assert index.find_at(page, node.start + at) is node
            assert index.find_at(page, node.start + at + rng.choice((-1, 1))) is None
        missing = some_page(rng)
        assert index.find(missing) is None and index.find_at(missing, 0) is None
    assert all(index.find(page) is node for page, (node, _) in where.items())
    for node in nodes:
        index.remove(node)
    assert all(index.find(page) is None for page in where)
    # What is gone takes no room, which `find` would not show.
    assert not index._ids and not index._nodes


def test_a_hash_of_another_size_is_refused() -> None:
    index = PageIndex()
    with pytest.raises(ValueError, match="16 bytes"):
        index.put_new(Node(None, (PageHash(b"short"),)))
