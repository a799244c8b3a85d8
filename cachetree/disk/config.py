"""What an operator may set on a disk store, and what it says of itself."""

from __future__ import annotations

from typing import Final

import msgspec

from cachetree.errors import ConfigError

_FILES_PER_BUDGET: Final = 8
"""At least, so that little goes at once."""


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where entries are kept on disk, and how many bytes of them."""

    path: str
    """A directory of its own, for one family and one process at a time; made if missing."""
    num_bytes: int
    """Budget of all files in it, the write under way included."""
    file_bytes: int = 64 << 20
    """Largest file; less where the budget is small. Entries that are longer are cut."""
    sync: bool = False
    """Whether each entry is flushed to the device before it counts. Without it a killed process
    loses only the entry it was writing, but a power cut may lose what the kernel had not written
    back (about the last 30 s); what it damaged is found by checksum and dropped."""

    def __post_init__(self) -> None:
        for field in ("num_bytes", "file_bytes"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"disk {field} is {getattr(self, field)}; it must be above 0")

    @property
    def max_file_bytes(self) -> int:
        return min(self.file_bytes, self.num_bytes // _FILES_PER_BUDGET)


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
