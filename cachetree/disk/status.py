"""What a disk store says of itself."""

from __future__ import annotations

import msgspec


class DiskCounts(msgspec.Struct, kw_only=True):
    """What happened since a store was opened; under its lock."""

    num_written_entries: int = 0
    num_written_bytes: int = 0
    num_failed_writes: int = 0
    """The disk was full or failed, or the budget had no room."""
    num_read_bytes: int = 0
    num_damaged_entries: int = 0
    """Found damaged or unreadable, when it was opened or read; with what stood on them."""
    num_torn_writes: int = 0
    """Files that a process had begun when it died."""
    num_evicted_entries: int = 0


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A disk store in numbers."""

    num_bytes: int
    """Of all files now, the write under way included."""
    budget_bytes: int
    num_entries: int
    num_pages: int
    counts: DiskCounts
    num_late_entries: int = 0
    """Gone from memory before they could be written."""
    is_failing: bool = False
    """The last write failed."""
    is_warm: bool = False
    """What was used last has been read into free memory, as far as it goes."""
