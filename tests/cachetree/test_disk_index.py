"""The index of the disk store: what it takes to let many entries go."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_parts import FAMILY, A, open_store, write

from cachetree.disk import DiskEntry
from cachetree.disk.entry_file import Record
from cachetree.disk.index import DiskIndex
from cachetree.ids import PageHash
from cachetree.memory import Layout
from cachetree.tree import Change

NUM_ENTRIES = 8000


def page(number: int) -> PageHash:
    return PageHash(hashlib.sha256(b"%d" % number).digest()[:16])


def entry_of(number: int, pages: Sequence[PageHash], parent: PageHash | None) -> DiskEntry:
    record = Record(
        family=b"",
        model=A,
        num_before=0 if parent is None else 1,
        parent=parent,
        pages=tuple(pages),
        layout=Layout.of(FAMILY, len(pages), ()),
    )
    return DiskEntry(record, number, 1)


@pytest.mark.parametrize("is_everything", [True, False])
def test_letting_go_of_many_entries_looks_at_each_once(is_everything: bool) -> None:
    """Prompts without a common page, or that all go on from one; others wait for the index."""
    heard: list[Change] = []
    index = DiskIndex(heard.append)
    parent = None if is_everything else page(0)
    if parent is not None:
        index.publish(entry_of(0, [parent], None))
    for number in range(1, NUM_ENTRIES):
        assert index.publish(entry_of(number, [page(number)], parent)) == []
    begun_s = time.perf_counter()
    gone = index.drop_from(None, [] if parent is None else [parent])
    seconds = time.perf_counter() - begun_s
    assert len(gone) == NUM_ENTRIES - is_everything
    assert [change.added for change in heard] == [True] * len(gone) + [False] * len(gone)
    assert len(index) == index.num_pages == 0
    # About 0.1 s; 10 s where each entry looks at all others for what stands on it.
    assert seconds < 2


def test_a_status_waits_for_nobody_who_takes_many_entries_out(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
        with ThreadPoolExecutor() as others, store.index._lock:
            assert others.submit(store.status).result(timeout=5).num_pages == 3


def test_pages_that_are_no_prompt_let_nothing_of_another_go() -> None:
    index = DiskIndex(lambda change: None)
    for number, parent in ((1, None), (2, None), (3, page(2))):
        assert index.publish(entry_of(number, [page(number)], parent)) == []
    assert index.drop_from(None, [page(1), page(3)]) == []
    assert [each.number for each in index.drop_from(None, [page(2), page(3)])] == [3, 2]


def test_an_entry_that_loses_pages_meanwhile_is_shown_with_all_of_them_or_with_the_rest() -> None:
    pages = [page(number) for number in range(4)]

    class Moving(DiskEntry):
        """Others take another page whenever `start` has been read."""

        @property
        def start(self) -> int:  # type: ignore[override]
            self.num_taken += 1
            return self.num_taken - 1

        @start.setter
        def start(self, start: int) -> None:
            self.num_taken = start

    for num_taken in range(3):
        entry = Moving(entry_of(1, pages, page(9)).record, 1, 1)
        entry.num_taken = num_taken
        change = entry.change(added=True)
        assert change.pages == tuple(pages[num_taken:])
        assert change.parent == (pages[num_taken - 1] if num_taken else page(9))
