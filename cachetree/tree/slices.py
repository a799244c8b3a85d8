"""Long work on a tree, in slices between which others have its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from cachetree.tree.entries import Change, Entry, Node

OfNode = Callable[[Node], Iterator[Change]]
"""What listeners of one kind would have heard of a node."""
SLICE: Final = 16
"""Nodes that are looked at before others may have the lock."""
_PAUSE_S: Final = 50e-6
"""Between two slices. A lock is not fair: whoever waits for it gets it while nobody wants it."""


def in_slices(lock: threading.Lock, work: Callable[[int], bool]) -> None:
    """Call it with how much it may do while others wait, until there is no more to do."""
    while True:
        with lock:
            is_more = work(SLICE)
        if not is_more:
            return
        time.sleep(_PAUSE_S)


def seen_in_slices(lock: threading.Lock, root: Node, of_node: OfNode) -> Iterator[Change]:
    """What is seen of the nodes below `root`, looked up as it is asked for."""
    nodes = root.walk()
    is_more = True
    while is_more:
        with lock:
            some = list(islice(nodes, SLICE))
            seen = [each for node in some for each in of_node(node)]
        is_more = len(some) == SLICE
        if is_more:
            time.sleep(_PAUSE_S)
        yield from seen


def spread_e(changed: Sequence[Entry]) -> Callable[[int], bool]:
    """How far E reaches below entries of one model and place, computed anew: work for `in_slices`,
    made in the same hold of the lock as their `set_e`, as a node that is split has others below it.

    Until it is done those below say what was so before.
    """
    steps = _below_changed(changed, [it for each in changed for it in each.node.children.values()])
    return lambda most: len(list(islice(steps, 2 * most))) == 2 * most  # Short ones.


def _below_changed(changed: Sequence[Entry], pending: list[Node]) -> Iterator[None]:
    while pending:
        entry = changed[0].at(pending.pop())
        if entry is not None:
            before = entry.e_reach
            entry.set_e(entry.e_layers)
            if entry.e_reach != before:
                pending.extend(entry.node.children.values())
        yield
