"""Waiting requests among stand-ins that remember what they were asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from test_waiting import PAGE, PLAN, SilentCache, planner_of, waiting_on

from cachetree.planning import Patience
from sglang_droidspeak.engine.prefixes import own_pages_of
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import Held

TREE: Any = object()
NUM_PAGES = 4
"""Of each request here that may be reused."""
STEP_BYTES = 40
WANTED = {"is_experiment": True, "patience": Patience(saving_s=math.inf), "step_share": 0.5}
"""As where a request asks for a block by name and no gate decides."""


@dataclass
class Told:
    """Labels: what each request was told last, by its id."""

    by_rid: dict[str, Any] = field(default_factory=dict)

    def note(self, req: Any, told: Any) -> None:
        self.by_rid[req.rid] = told


class Asked(SilentCache):
    """A cache that remembers what it was asked for, and a pool that has some of it."""

    def __init__(self, clock: Any = lambda: 0.0, held: Held | None = None) -> None:
        super().__init__(clock)
        self.searched: list[Any] = []
        self.fetched: list[Any] = []
        self.has_approximate = held is not None and held.approximate > 0
        self.where: list[Any] = []
        self.has = held or Held(0, 0)

    def search(self, pages: Any) -> list[Any]:
        self.searched.append(list(pages))
        return super().search(pages)

    def fetch(self, plan: Any, pages: Any, deadline: Any, context: str) -> Any:
        self.fetched.append((plan, list(pages)))
        return super().fetch(plan, pages, deadline, context)

    def held(self, req: Any, num_pages: int, tree: Any) -> Held:
        self.where.append((req.rid, num_pages, tree))
        return self.has

    def land(self) -> None:
        for staging in self.stagings:
            for step in PLAN.steps:
                staging.land(step, STEP_BYTES)


def waiting_with(cache: Asked, **parts: Any) -> tuple[WaitingRequests, Told]:
    told = Told()
    given: Any = {"labels": told, "pool": cache, "planner": planner_of(**WANTED), **parts}
    return waiting_on(cache, [], **given), told


def look(waiting: WaitingRequests, *reqs: Any) -> set[str]:
    return waiting.look(list(reqs), TREE, is_decoding=False)


def loading(waiting: WaitingRequests, cache: Asked, req: Any, *keys: str) -> tuple[Any, Any]:
    """What has begun to load once all has come: these pages, or all; and its slots."""
    cache.land()
    assert not look(waiting, req)
    wanted = keys or keys_of(req)
    slots = torch.arange(len(wanted) * PAGE)
    assert waiting.take(req.rid, wanted, slots)
    (taken,) = waiting.start()
    return taken, slots


def keys_of(req: Any) -> list[str]:
    return [page.hex() for page in own_pages_of(req, NUM_PAGES * PAGE, PAGE)]


def asking(**settings: Any) -> Any:
    """A server with a store that is asked what it has."""
    known = {
        "hicache_backend": "file",
        "fetch_deadline_s": 1e3,
        "max_stall_s": None,
        "gate": "none",
        "min_tokens": 2 * PAGE,
    }
    return SimpleNamespace(settings=SimpleNamespace(**known | settings), page_size=PAGE)
