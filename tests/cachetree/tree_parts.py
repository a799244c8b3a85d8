"""A small tree with letters as pages, for its tests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from profile_parts import HALF, family

from cachetree.clock import Deadline
from cachetree.ids import KV as KV_PART
from cachetree.ids import LOCAL, Kind, Location, ModelId, PageHash, Part, Step, steps_of
from cachetree.memory import scatter
from cachetree.tree.holds import Lease
from cachetree.tree.tree import CacheTree

FAMILY = family(num_layers=3, hidden_size=4, num_kv_heads=1, page_size=1, **HALF)
KV, E = FAMILY.kv_page_bytes, FAMILY.e_page_bytes
PAGE = 3 * KV
"""Bytes of one page without E."""
KV0 = Step(Kind.KV, 0)
A, B = ModelId("a"), ModelId("b")
FAR, FARTHER = Location("tcp://far:1"), Location("tcp://farther:1")


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def path(text: str) -> list[PageHash]:
    """Return one page hash per character. Each hash covers the characters before it."""
    return [
        PageHash(hashlib.sha256(text[: i + 1].encode()).digest()[:16]) for i in range(len(text))
    ]


def content(model: ModelId, pages: Sequence[PageHash], step: Step) -> bytes:
    """Content of these pages at one step. It differs for every model, page and step."""
    seed, size = f"{model}{step.layer}{step.kind}".encode(), FAMILY.page_bytes(step.kind)
    return b"".join(hashlib.shake_128(seed + page).digest(size) for page in pages)


def store(tree, model, text, start=0, e_layers=()):
    """Reserve, fill and commit KV and E of the pages of `text` from page `start` on. Return the new
    pages of the last part."""
    pages, new = path(text), tuple[PageHash, ...]()
    parent = pages[start - 1] if start else None
    for part in (KV_PART, *map(Part, e_layers)):
        reservation = tree.reserve(model, parent, pages[start:], part)
        with reservation:
            for step in reservation.steps:
                piece = content(model, reservation.pages, step)
                scatter(reservation.views(step), memoryview(piece))
            reservation.commit()
        new = reservation.pages
    return new


def advertise(tree, location, model, text, *e_layers, start=0):
    """Note KV and E of the pages of `text` from page `start` on at a location."""
    pages = path(text)
    for part in (KV_PART, *map(Part, e_layers)):
        parent = pages[start - 1] if start else None
        tree.remote.add(location, model, parent, pages[start:], part)


def num_pages(tree: CacheTree, model: ModelId, text: str, location: Location = LOCAL) -> int:
    matches = [m for m in tree.match(path(text)) if (m.model, m.location) == (model, location)]
    return matches[0].num_pages if matches else 0


def leased(tree: CacheTree, model: ModelId, text: str, *e_layers: int) -> Lease:
    parts = (KV_PART, *map(Part, e_layers))
    lease = tree.lease(model, path(text), "test", far_future(), parts)
    assert lease is not None
    return lease


def has_content(lease: Lease, model: ModelId, text: str, e_layers: Collection[int] = ()) -> bool:
    """Whether the lease reads the right content of the pages of `text`, with E at these layers."""
    return all(
        b"".join(lease.views(step)) == content(model, path(text), step)
        for part in (KV_PART, *map(Part, e_layers))
        for step in steps_of(part, FAMILY.num_layers)
    )


def make_tree(num_pages: int = 100, clock: FakeTime | None = None) -> CacheTree:
    return CacheTree(FAMILY, host_bytes=num_pages * PAGE, clock=clock or FakeTime())


def far_future() -> Deadline:
    return Deadline(1e9)
