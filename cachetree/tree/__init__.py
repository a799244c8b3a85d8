"""The prefix tree of a family. It knows which pages' KV and E each model has, and where.

Rules of this package

    - A page hash covers all pages before it. So a page that matches proves all pages before it.
    - A node has consecutive pages. An entry covers all pages of its node. To add an entry for fewer
      pages, the tree first splits the node.
    - A local entry's key is (model, part), and a remote entry's key is (location, model, part). A
      part is KV of all layers, or E of one layer. A key in a node is also in every node above it.
      So the last node with a key ends that key's prefix. A node without entries has no children,
      and is removed.
    - Local E is only in nodes with local KV of the same model, and is evicted before that KV.
    - A local entry is the exact KV or E of its pages. A remote entry is only a location's claim.
    - No key has the same page in two nodes. A wrong advert may put a page into a second node, under
      other keys; the search then looks for the node with the wanted key.
    - Local bytes, including open reservations, never exceed the budget. Bytes are counted before
      they are allocated. Pages are visible to `match` from `commit` on.
    - A page is not evicted while it is leased, pinned, or continued by an open reservation. Pages
      above it stay, too, because eviction begins with the leaves.
    - One lock guards everything. A thread that holds it does not allocate, copy or wait for a disk.
      Listeners are called with the lock held, so they must not block.

How it works

    match    An index finds the node of a page without a walk. A binary search finds the prompt's
             last page in the tree. One walk from there to the root collects every key, so it
             answers for all models and locations at once. A miss at the first page takes no lock.
    reserve  Evict until the new pages fit, count their bytes, release the lock, and take memory.
             The owner fills it. `commit` takes the lock, splits or makes nodes, and drops pages
             that another reservation has published meanwhile.
    lease    Hold entries until `release` or the deadline. Views taken before stay readable, because
             the pool of memory does not lend viewed bytes again.
    evict    The least recently used entry without children is evicted first. Only the last entry of
             a used prefix notes the use. An evicted entry passes its use on to its parents.
    remote   Workers and tiers add and drop entries for their location. If a location has more pages
             than its limit, its least recently used entries are dropped, a prompt's last first.

Long work (eviction of a prefix, forgetting a location, a snapshot) is done in slices; between
slices other threads get the lock.

Why not otherwise

    - One tree per model would need one walk per model, for the same pages of the same prompt.
    - A use could move all entries of the prefix to the end of a list. This takes a step per node,
      with the lock held. Instead a use raises one number, at the last entry.
    - A lock per node would allow parallel walks. Python runs one thread at a time anyway, and a
      walk takes microseconds.
    - E could be a part of the KV entry. But only some layers have E, and E is evicted first.
    - Eviction could move an entry to disk. `cachetree.disk` writes entries when they are added, for
      reasons that `DiskTier` states.

What could be better

    - Eviction takes whole nodes of one key, even if fewer pages would make enough room.
    - Python's locks do not serve waiting threads in order, so long work pauses between slices.
    - A match looks at every key of the nodes on its walk. So a peer's number of models is limited.
"""

from cachetree.tree.entries import Change, EntryKey
from cachetree.tree.eviction import Retention
from cachetree.tree.hashing import join_hashes, page_digests, page_hashes, split_hashes
from cachetree.tree.holds import Lease, Reservation
from cachetree.tree.listeners import Listener
from cachetree.tree.tree import CacheTree

__all__ = [
    "CacheTree",
    "Change",
    "EntryKey",
    "Lease",
    "Listener",
    "Reservation",
    "Retention",
    "join_hashes",
    "page_digests",
    "page_hashes",
    "split_hashes",
]
