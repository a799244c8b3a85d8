"""What a store's files hold when it is opened."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from cachetree.checkpoint import Family
from cachetree.disk.directory import Directory
from cachetree.disk.record import Record
from cachetree.disk.segment import SEGMENT_HEADER_BYTES, Place, Scan, Segment, scan
from cachetree.ids import ModelId, PageHash

log = logging.getLogger(__name__)

Found = tuple[Record, Place]


@dataclass(slots=True)
class Recovered:
    segments: list[Segment] = field(default_factory=list)
    records: list[Found] = field(default_factory=list)
    """Each after the one that it stands on; those that stand on nothing come last."""
    num_torn: int = 0
    num_damaged: int = 0


def recover(directory: Directory, family: Family) -> Recovered:
    """Scan all files; cut off torn tails and delete files that cannot be read.

    Raises OSError where a file can be neither read nor cut nor deleted.
    """
    result = Recovered()
    records: list[Found] = []
    for number in directory.segment_numbers():
        segment = Segment(directory.segment_path(number), number, directory.marker)
        size = segment.path.stat().st_size
        try:
            found = scan(segment, size, family)
        except OSError as exc:
            log.warning("%s cannot be read: %s", segment.path, exc)
            found = Scan([])
        result.num_damaged += found.num_damaged
        if found.num_damaged:
            log.warning("%s has damaged entries: %d", segment.path, found.num_damaged)
        if not found.stop:
            # Shorter than its header: a crash came in between.
            result.num_torn += size < SEGMENT_HEADER_BYTES
            result.num_damaged += size >= SEGMENT_HEADER_BYTES
            log.warning("%s is no segment of this directory; deleted", segment.path)
            segment.path.unlink()
            continue
        if found.stop < size:
            result.num_torn += 1
            log.warning("%s ends in a torn write; cut %d bytes", segment.path, size - found.stop)
            os.truncate(segment.path, found.stop)
        segment.num_bytes = found.stop
        result.segments.append(segment)
        records += found.found
    result.records = _parents_first(records)
    return result


def _parents_first(records: list[Found]) -> list[Found]:
    """A moved record may come after those that stand on it."""
    seen: dict[ModelId, set[PageHash]] = {}
    waiting: dict[tuple[ModelId, PageHash], list[Found]] = {}
    ordered: list[Found] = []
    for each in records:
        ready = [each]
        while ready:
            found = ready.pop()
            model, parent = found[0].model, found[0].parent
            pages = seen.setdefault(model, set())
            if parent is not None and parent not in pages:
                waiting.setdefault((model, parent), []).append(found)
                continue
            ordered.append(found)
            pages.update(found[0].pages)
            for page in found[0].pages if waiting else ():
                ready += waiting.pop((model, page), ())
    return ordered + [found for group in waiting.values() for found in group]
