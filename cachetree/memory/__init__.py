"""Host memory: where pages lie, and where fetched layers arrive.

Pool     lends memory within a budget: `Arena` from a file that other processes of the host may
         map, `PlainPool` from an allocator; what it lends is a loan
Slab     the loan of one reservation: all layers of its pages, given back page by page
Segment  consecutive pages of one slab
Staging  the loan of one fetch, which fills it step by step
"""

from cachetree.memory.arena import Arena, ArenaReader, pool_of
from cachetree.memory.copying import PIECE_BYTES, checksum, checksum_of_parts, copy, copy_in_pieces
from cachetree.memory.pool import NO_MEMORY, PAGEABLE, ArenaFile, NoRoom, PlainPool, Pool
from cachetree.memory.ranges import Ranges
from cachetree.memory.slab import Layout, Segment, Slab, join, kept_bytes
from cachetree.memory.staging import Allocate, Budget, BudgetedStaging, Staging, pageable
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
    "NoRoom",
    "PlainPool",
    "Pool",
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
    "pageable",
    "pool_of",
]
