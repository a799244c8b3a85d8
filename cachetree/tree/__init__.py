"""The prefix tree: which model has the KV and E of which pages, and where; what leaves first.

Rules of this package

    - A page hash covers all pages before it. So a page that matches proves all pages before it.
    - A node has consecutive pages. An entry in a node covers all of its pages; an entry for fewer
      pages splits the node first.
    - Entries have keys: (model, part) for local ones, with a location in front for remote ones. A
      part is KV of all layers, or E of one layer. A key in a node is also in every node above it.
      So the last node with a key says how far that key's prefix reaches, and a node without entries
      has no children and is removed.
    - Local E is only in nodes with local KV of the same model, and leaves before that KV.
    - A local entry is the exact KV or E of its pages. A remote entry is only a claim of a location.
    - A key has a page in one node at most. A wrong advert may put a page into a second node, under
      other keys; the search then looks for the node with the wanted key.
    - Local bytes, including open reservations, never exceed the budget. Bytes are counted before
      they are allocated. Pages are visible to `match` from `commit` on.
    - A leased or pinned page is not evicted, nor is one that an open reservation will continue, nor
      any page above them. A hold names only its own pages: eviction is leaf first.
    - One lock guards everything. No thread allocates, copies or waits for a disk while it holds it.
      Listeners are called with the lock held, so they must not block.

How it works

    match    An index finds the node of a page without a walk. The last page of the prompt that is
             in its place is found by halving. One walk from there to the root collects every key,
             so it answers for all models and locations at once. A miss at the first page takes no
             lock.
    reserve  Evict until the new pages fit, count them, release the lock, take memory. The owner
             fills it. `commit` takes the lock, splits or makes nodes, and drops pages that another
             reservation has published meanwhile.
    lease    Holds entries until `release` or its deadline. Views taken before stay readable:
             the pool does not lend viewed bytes again.
    evict    The least recently used entry without children goes first. A walk notes its use only at
             the entry where it ended; an entry without remaining children inherits their last use.
    remote   Workers and tiers add and drop entries for their location. Beyond a location's limit
             its coldest entries are dropped, a prompt's last pages first.

Long work (eviction of a prefix, forgetting a location, a snapshot) is done in slices; between
slices other threads get the lock.

Why not otherwise

    - One tree per model would need one walk per model, for the same pages of the same prompt.
    - A use could move the entry and all above it in a list. That costs a step per node, with the
      lock held; raising one number at the last entry costs nothing until an eviction.
    - A lock per node would allow parallel walks. Python runs one thread at a time anyway, and a
      walk takes microseconds.
    - E could be a part of the KV entry. But only some layers have E, and E should leave first.
    - Eviction could move an entry to disk. `cachetree.disk` writes entries when they are added, for
      reasons that `DiskTier` states.

What could be better

    - Eviction takes whole nodes of one key, even if fewer pages would make enough room.
    - Python's lock is not fair, so long work has to pause between slices.
    - A match looks at every key of the nodes that it meets; hence limits on the models of a peer.
"""

from cachetree.tree.entries import Change
from cachetree.tree.eviction import Retention
from cachetree.tree.hashing import join_hashes, page_digests, page_hashes, split_hashes
from cachetree.tree.holds import Lease, Reservation
from cachetree.tree.listeners import Listener
from cachetree.tree.tree import CacheTree

__all__ = [
    "CacheTree",
    "Change",
    "Lease",
    "Listener",
    "Reservation",
    "Retention",
    "join_hashes",
    "page_digests",
    "page_hashes",
    "split_hashes",
]
