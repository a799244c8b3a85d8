"""Host memory for pages and for fetched layers.

Arena    a `Pool`: host memory, allocated at the start and registered with the device
Loan     memory that a pool has lent to a slab or a staging, in one run or several
Slab     the loan of one reservation: all layers of its pages, given back page by page
Staging  the loan of one fetch, which fills it one transfer step after another
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
