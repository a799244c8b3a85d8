"""Memory and files that the processes of a group hold, as the kernel counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GONE = (FileNotFoundError, ProcessLookupError)


def folders(group: int) -> Iterator[Path]:
    """Yield the /proc folder of every living process in a process group."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(*_GONE):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                yield stat.parent


def num_descriptors(group: int) -> int:
    return _num_entries(group, "fd")


def num_threads(group: int) -> int:
    return _num_entries(group, "task")


def resident_bytes(group: int) -> int:
    """Return the sum of resident set sizes. Memory that processes share counts once for each
    process."""
    num_pages = 0
    for folder in folders(group):
        with suppress(*_GONE):
            num_pages += int((folder / "statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


class Resident(NamedTuple):
    own_bytes: int
    """Bytes that only these processes use: heaps and stacks."""
    mapped_bytes: int
    """Bytes of files, and of memory that other processes map, too. Memory that processes share
    counts once for each process."""


def resident(group: int) -> Resident:
    """Return the memory of a group of processes, exact to the page. `statm`, which `resident_bytes`
    reads, is wrong by up to 64 pages for each thread."""
    whole = own = 0
    for folder in folders(group):
        with suppress(*_GONE):
            for line in (folder / "smaps_rollup").read_text().splitlines():
                name, _, size = line.partition(":")
                whole += int(size.split()[0]) << 10 if name == "Rss" else 0
                own += int(size.split()[0]) << 10 if name == "Anonymous" else 0
    return Resident(own, whole - own)


def _num_entries(group: int, name: str) -> int:
    num = 0
    for folder in folders(group):
        with suppress(*_GONE):
            num += sum(1 for _ in (folder / name).iterdir())
    return num
