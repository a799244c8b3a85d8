"""Host memory: where pages lie, and where fetched layers arrive."""

from cachetree.memory.arena import Arena, ArenaReader, memory_of
from cachetree.memory.budget import Budget, BudgetedStaging
from cachetree.memory.copying import PIECE_BYTES, checksum, checksum_of_parts, copy, copy_in_pieces
from cachetree.memory.memory import NO_MEMORY, PAGEABLE, ArenaFile, Memory, NoRoom, Plain
from cachetree.memory.ranges import Ranges
from cachetree.memory.slab import Layout, Segment, Slab, join, kept_bytes
from cachetree.memory.staging import Allocate, Staging, pageable
from cachetree.memory.staging_pool import StagingPool

__all__ = [
    "NO_MEMORY",
    "PAGEABLE",
    "PIECE_BYTES",
    "Allocate",
    "Arena",
    "ArenaFile",
    "ArenaReader",
    "Budget",
    "BudgetedStaging",
    "Layout",
    "Memory",
    "NoRoom",
    "Plain",
    "Ranges",
    "Segment",
    "Slab",
    "Staging",
    "StagingPool",
    "checksum",
    "checksum_of_parts",
    "copy",
    "copy_in_pieces",
    "join",
    "kept_bytes",
    "memory_of",
    "pageable",
]
