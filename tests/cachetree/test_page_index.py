"""The index against a plain dict from pages to nodes, with hashes that are alike in part."""

from __future__ import annotations

import random
import struct

import pytest

from cachetree.ids import PageHash
from cachetree.tree.entries import Node
from cachetree.tree.page_index import PageIndex, Run

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
            run = index.add(pages)
            if num_new == 0:
                assert run is None
                continue
            assert run is not None and len(run) == num_new
            cut = rng.randint(0, num_new - 1)
            above = None
            for first, stop in ((0, cut), (cut, num_new)):
                if first < stop:
                    above = Node(above, run, first, stop - first)
                    nodes.append(above)
                    where |= {pages[i]: (above, i) for i in range(first, stop)}
        else:
            gone = [nodes.pop(rng.randrange(len(nodes))) for _ in range(min(3, len(nodes)))]
            for node in gone:
                for page in node.pages:
                    del where[page]
                node.run.drop(node)
            index.remove([(node.run, node.first, node.first + node.num_pages) for node in gone])
            for run in {node.run for node in gone}:
                run.compact()
                for node in run.nodes:
                    pages_of_node = node.pages
                    where |= {it: (node, node.first + i) for i, it in enumerate(pages_of_node)}
        for page in rng.sample(list(where), min(50, len(where))):
            node, at = where[page]
            depth = node.start + at - node.first
            assert index.find(page) == (node, at)
            assert index.find_at(page, depth) is node
            assert index.find_at(page, depth + rng.choice((-1, 1))) is None
        missing = some_page(rng)
        assert index.find(missing) is None and index.find_at(missing, 0) is None
    assert all(index.find(page) == place for page, place in where.items())
    while nodes:
        node = nodes.pop()
        node.run.drop(node)
        index.remove([(node.run, node.first, node.first + node.num_pages)])
        assert len(node.run.nodes) == 0 or index.find(node.run.nodes[0].first_page) is not None
    assert all(index.find(page) is None for page in where)
    # What is gone takes no room, which `find` would not show.
    assert not index._run_ids and not index._runs


def test_a_run_keeps_no_more_than_twice_the_pages_of_its_nodes() -> None:
    run = Run([PageHash(i.to_bytes(16, "big")) for i in range(10)], 1)
    head, middle, tail = (Node(None, run, *part) for part in ((0, 2), (2, 6), (8, 2)))
    pages = [*head.pages, *tail.pages]
    run.drop(middle)
    run.num_indexed_pages -= middle.num_pages
    run.compact()
    assert len(run) == 4
    assert [*head.pages, *tail.pages] == pages
    assert list(run.pages) == pages
    assert run.node_at(2) is tail


def test_a_hash_of_another_size_is_refused() -> None:
    index = PageIndex()
    with pytest.raises(ValueError, match="16 bytes"):
        index.add([PageHash(b"short")])
