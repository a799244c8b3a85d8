"""Which local entry goes next. One file per policy, behind one protocol.

`make_policy` builds the one that a `Retention` names. The disk store below the tree keeps to
LRU: what it moves between its files follows the order of use, whatever memory does.
"""

from __future__ import annotations

from cachetree.checkpoint import Family
from cachetree.planning import PrefillCost
from cachetree.tree.eviction.config import POLICIES, Retention
from cachetree.tree.eviction.expiry import Expiry
from cachetree.tree.eviction.lru import Lru
from cachetree.tree.eviction.protocol import Eviction
from cachetree.tree.eviction.value import ByValue

__all__ = ["POLICIES", "Eviction", "Expiry", "Retention", "make_policy"]


def make_policy(name: str, family: Family, host_bytes: int) -> Eviction:
    """The policy of this name, one of `POLICIES`, for a budget of `host_bytes`."""
    if name == "value":
        return ByValue(PrefillCost.of(family), family.page_size, host_bytes)
    return Lru()
