"""Long work on a tree, in slices between which others have its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from cachetree.tree.entries import Entry, Node

T = TypeVar("T")

SLICE: Final = 16
"""Steps, most of which look at one node, before others may have the lock."""
_PAUSE_S: Final = 50e-6
"""Between two slices. A lock is not fair: whoever waits for it gets it while nobody wants it."""


def in_slices(lock: threading.Lock, steps: Iterator[T], num_at_once: int = SLICE) -> Iterator[T]:
    """What the steps say, which are done with the lock held, so many at once, as that is asked."""
    while True:
        with lock:
            some = list(islice(steps, num_at_once))
        yield from some
        if len(some) < num_at_once:
            return
        time.sleep(_PAUSE_S)


def run_in_slices(lock: threading.Lock, steps: Iterator[object], num_at_once: int = SLICE) -> None:
    """Do all of them."""
    for _ in in_slices(lock, steps, num_at_once):
        pass


def spread_e(changed: Sequence[Entry]) -> Iterator[None]:
    """How far E reaches below entries of one model and place, computed anew: short steps, made in
    the same hold of the lock as their `set_e`, as a node that is split has others below it.

    Until they are done those below say what was so before.
    """
    children = [it for each in changed for it in each.node.children.values()]
    return _below_changed(changed, children)


def _below_changed(changed: Sequence[Entry], pending: list[Node]) -> Iterator[None]:
    while pending:
        entry = changed[0].at(pending.pop())
        if entry is not None:
            before = entry.e_reach
            entry.set_e(entry.e_layers)
            if entry.e_reach != before:
                pending.extend(entry.node.children.values())
        yield
