"""The index compared with a plain dict from pages to nodes. Some hashes have equal beginnings."""

from __future__ import annotations

import random
import struct

import pytest

from cachetree.ids import PageHash
from cachetree.tree.entries import Node
from cachetree.tree.trie import PageIndex

NUM_CROWDED = 64


def some_page(rng: random.Random) -> PageHash:
    """Draw a random page hash, or one of many with the same first eight bytes."""
    if rng.random() < 0.7:
        return PageHash(rng.randbytes(16))
    word = rng.randrange(NUM_CROWDED) << rng.choice((0, 32, 58))
    return PageHash(struct.pack("<QQ", word, rng.getrandbits(60)))


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_a_dict_finds(seed):
    rng = random.Random(seed)
    index = PageIndex()
    where: dict[PageHash, list[tuple[Node, int]]] = {}
    nodes: list[Node] = []
    for _ in range(300):
        if rng.random() < 0.6 or not nodes:
            pages = [some_page(rng) for _ in range(rng.randint(1, 60))]
            if rng.random() < 0.4 and where:
                pages[rng.randrange(len(pages))] = rng.choice([*where])
            made = [Node(None, tuple(dict.fromkeys(pages)))]
            index.put_new(made[0])
            if cut := rng.randint(0, made[0].num_pages - 1):
                made.append(made[0].split(cut))
                index.split(*made)
            nodes += made
            for node in made:
                for i, page in enumerate(node.pages):
                    where.setdefault(page, []).append((node, i))
        else:
            for node in [nodes.pop(rng.randrange(len(nodes))) for _ in range(min(3, len(nodes)))]:
                for i, page in enumerate(node.pages):
                    where[page].remove((node, i))
                    if not where[page]:
                        del where[page]
                index.remove(node)
        several = [page for page, places in where.items() if len(places) > 1]
        for page in (*rng.sample(list(where), min(50, len(where))), *several):
            places = {(node, node.start + i) for node, i in where[page]}
            assert index.find(page) in {node for node, _ in places}
            for node, depth in places:
                assert index.find(page, lambda it, node=node: it is node) is node
                assert index.find_at(page, depth, lambda it, node=node: it is node) is node
                assert (index.find_at(page, depth), depth) in places
                off = depth + rng.choice((-1, 1))
                assert off in {at for _, at in places} or index.find_at(page, off) is None
        missing = some_page(rng)
        assert missing in where or index.find(missing) is index.find_at(missing, 0) is None
    for node in nodes:
        index.remove(node)
    assert all(index.find(page) is None for page in where)
    # What is gone takes no room, which `find` would not show.
    assert not index._ids and not index._more and not index._nodes


def test_a_hash_of_another_size_is_refused():
    index = PageIndex()
    with pytest.raises(ValueError, match="16 bytes"):
        index.put_new(Node(None, (PageHash(b"short"),)))
