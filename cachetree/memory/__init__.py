"""Host memory for pages and for fetched layers.

Arena    all host memory, made at start and known to the device; a `Pool`, which lends runs of bytes
Loan     lent bytes of a pool: parts, each in one run or a few
Slab     the loan of one reservation: all layers of its pages, given back page by page
Staging  the loan of one fetch, which fills it step by step
"""

from cachetree.memory.arena import Arena, ArenaReader, Register, unregistered
from cachetree.memory.copying import checksum, checksum_of_parts, cut, scatter
from cachetree.memory.slab import (
    ArenaFile,
    Blocks,
    Layout,
    Loan,
    NoRoom,
    Pool,
    Slab,
    Torn,
    index_of,
)
from cachetree.memory.staging import Staging, staged

__all__ = [
    "Arena",
    "ArenaFile",
    "ArenaReader",
    "Blocks",
    "Layout",
    "Loan",
    "NoRoom",
    "Pool",
    "Register",
    "Slab",
    "Staging",
    "Torn",
    "checksum",
    "checksum_of_parts",
    "cut",
    "index_of",
    "scatter",
    "staged",
    "unregistered",
]
