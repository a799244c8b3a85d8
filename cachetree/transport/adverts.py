"""Changes of a tree as messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from cachetree.ids import PAGE_HASH_BYTES, PageHash
from cachetree.transport.wire import Entry, join_pages

ENTRY_PAGES: Final = 2048
"""Pages per `Entries` message: 32 KiB of hashes, so that adverts never delay a frame for long."""

_ENTRY_WEIGHT: Final = 8
"""What an entry costs besides its pages, in page hashes."""


def entries_of(
    *,
    added: bool,
    model: str,
    parent: PageHash | None,
    pages: Sequence[PageHash],
    e_layers: Sequence[int],
) -> Iterator[Entry]:
    """One change as entries of at most `ENTRY_PAGES` pages, each the parent of the next.

    Removals come last part first, so that a page is never left without its parent.
    """
    starts = range(0, len(pages), ENTRY_PAGES)
    for start in starts if added else reversed(starts):
        before = pages[start - 1] if start else parent
        yield Entry(
            added=added,
            model=model,
            parent=before or b"",
            pages=join_pages(pages[start : start + ENTRY_PAGES]),
            e_layers=tuple(e_layers),
        )


def pack(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Group entries into messages of about `ENTRY_PAGES` pages, in order."""
    group: list[Entry] = []
    weight = 0
    for entry in entries:
        entry_weight = len(entry.pages) // PAGE_HASH_BYTES + _ENTRY_WEIGHT
        if group and weight + entry_weight > ENTRY_PAGES + _ENTRY_WEIGHT:
            yield tuple(group)
            group, weight = [], 0
        group.append(entry)
        weight += entry_weight
    if group:
        yield tuple(group)
