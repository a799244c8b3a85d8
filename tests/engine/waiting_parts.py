"""Waiting requests among stand-ins that remember what they were asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from permissive import made

from cachetree.clock import Clock, Deadline
from cachetree.ids import Location, ModelId, Span
from cachetree.memory import Arena, Blocks, Staging, staged
from cachetree.planning import Patience, PrefillCost
from cachetree.planning.plan import Plan
from cachetree.tier import Search
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import own_pages_of
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.planner import Declined, Planned
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import Held

TREE: Any = object()
PAGE = 16
NUM_PAGES = 4
"""Of each request here that may be reused."""
STEP_BYTES = 40
SAVING_S = 0.125
PLAN = Plan(
    sender=ModelId("s"),
    receiver=ModelId("r"),
    location=Location("tcp://127.0.0.1:1"),
    pages=Span(0, NUM_PAGES),
    block=Span(1, 3),
    num_layers=4,
)
WANTED = {"is_experiment": True, "patience": Patience(saving_s=math.inf), "step_share": 0.5}
"""As where a request asks for a block by name and no gate decides."""


@dataclass
class Told:
    """Labels: what requests were told. Its metrics: what each plan has saved."""

    notes: list[tuple[str, RequestProvenance]] = field(default_factory=list)
    savings: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> Any:
        return self

    def count_saving(self, _plan: Plan, seconds: float) -> None:
        self.savings.append(seconds)

    def note(self, req: Any, told: RequestProvenance) -> None:
        self.notes.append((req.rid, told))

    @property
    def by_rid(self) -> dict[str, RequestProvenance]:
        """The last of each."""
        return dict(self.notes)


class Asked:
    """A cache that remembers what it was asked for, and a pool that has some of it. Its worker
    takes every request, and sends nothing."""

    def __init__(self, clock: Clock = lambda: 0.0, held: Held | None = None) -> None:
        self.memory = Arena(1 << 20)
        self.stagings: list[Staging] = []
        self.searched: list[Any] = []
        self.fetched: list[Any] = []
        self.has_approximate = held is not None and held.approximate > 0
        self.where: list[Any] = []
        self.has = held or Held(0, 0)
        self._clock = clock
        self.loaded: list[Any] = []
        """Approximate pages."""
        self.peers: tuple[Any, ...] = ()

    def sources(self) -> tuple[Any, ...]:
        return self.peers

    def search(self, pages: Any) -> list[Search]:
        self.searched.append(list(pages))
        return [Search(Deadline(math.inf, self._clock))]

    def fetch(self, plan: Plan, pages: Any, deadline: Deadline, _context: str) -> Staging:
        self.fetched.append((plan, list(pages)))
        parts = dict.fromkeys(plan.steps, Blocks(1, STEP_BYTES))
        staging = staged(self.memory, parts, Deadline(deadline.at_s, self._clock))
        self.stagings.append(staging)
        return staging

    def held(self, req: Any, num_pages: int, tree: Any) -> Held:
        self.where.append((req.rid, num_pages, tree))
        return self.has

    def note_loaded(self, namespace: str, pages: Any) -> None:
        self.loaded += pages
        self.has_approximate = True

    def num_loaded(self, namespace: str, pages: Any) -> int:
        return sum(it in self.loaded for it in pages)

    def land(self, number: int | None = None) -> None:
        """All that is still missing of that fetch, or of each."""
        for staging in self.stagings if number is None else (self.stagings[number],):
            for step in PLAN.steps:
                if not staging.has_landed(step):
                    staging.land(step, STEP_BYTES)


class FakeMeter(SimpleNamespace):
    """Knows what it is made with."""

    def noticed(self, late_s: float) -> None:
        """Of no use here."""


METER: Any = FakeMeter(
    recompute=PrefillCost(token_s=1e-3, context_s=0.0),
    prefill=PrefillCost(fixed_s=SAVING_S, token_s=0.0, context_s=0.0),
)


class Request(SimpleNamespace):
    """Unlike its base it can be referred to weakly. Like SGLang's it has no tokens at first."""

    full_untruncated_fill_ids: Sequence[int] = ()

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = range(NUM_PAGES * PAGE + 1)


def request(
    rid: str = "r1",
    lora_id: str | None = None,
    *,
    n: int = 1,
    max_new_tokens: int = 8,
    **fields: Any,
) -> Any:
    """In the queue; with these fields of its own."""
    params = SimpleNamespace(n=n, max_new_tokens=max_new_tokens, custom_params=None)
    known = {
        "rid": rid,
        "lora_id": lora_id,
        "kv": SimpleNamespace(holds_kv=False),
        "output_ids": [],
        "origin_input_ids": array("q", [1, 2, 3]),
        "skip_radix_cache_insert": False,
        "customized_info": None,
        "multimodal_inputs": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "session": None,
        "extra_key": lora_id,
        "cache_salt": None,
        "sampling_params": params,
        "is_retracted": False,
        "retracted_stain": False,
        "extend_end": None,
        "finished_reason": None,
        "to_finish": None,
        "_compute_max_prefix_len": lambda length: length - 1,
    }
    return Request(**known | fields)


class Now:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0  # Before any deadline by the time since the machine was started.
        for module in ("request", "source"):
            monkeypatch.setattr(
                f"sglang_droidspeak.request.{module}.time", SimpleNamespace(monotonic=self)
            )

    def __call__(self) -> float:
        return self.now_s


def planner_that(plan: Callable[..., Planned | Declined]) -> Any:
    nothing = dict.fromkeys(("note", "meet"), lambda _req: None)
    return SimpleNamespace(**nothing, refusal=prefixes.refusal, plan=plan)


def planner_of(**planned: Any) -> Any:
    fixed = {"plan": PLAN, "is_experiment": False, "step_share": 0.0}
    value = Planned(**fixed | planned)
    return planner_that(lambda *_: value)


def planner_without(outcome: str, detail: str = "") -> Any:
    return planner_that(lambda *_: Declined(outcome, detail))


def counting_on(exact: int, approximate: int | None = None) -> Any:
    """What was considered for a request of which the device has so many pages."""
    demand = SimpleNamespace(first_page=exact, first_approximate=approximate)
    return SimpleNamespace(demand=demand, matches=())


def server_with(**settings: Any) -> Any:
    """Without a store that is asked what it has, unless it is given one."""
    known = {
        "hicache_backend": None,
        "fetch_deadline_s": 1e3,
        "max_stall_s": None,
        "gate": "none",
        "min_tokens": 2 * PAGE,
    }
    return SimpleNamespace(settings=SimpleNamespace(**known | settings), page_size=PAGE)


STORE = server_with(hicache_backend="file")


def waiting_with(cache: Asked, **parts: Any) -> tuple[WaitingRequests, Told]:
    told = Told()
    given: Any = {
        "meter": FakeMeter(recompute=None),
        "labels": told,
        "planner": planner_of(**WANTED),
        "followers": SimpleNamespace(
            follow=lambda *_: False, prune=lambda _waiting: None, clear=lambda: None
        ),
        "ranks": Ranks(None),
        **parts,
    }
    server, pool = given.get("server", server_with()), given.get("pool", cache)
    sources = Sources(server, cache, pool, SimpleNamespace(page_size=PAGE))  # type: ignore[arg-type]
    return made(WaitingRequests, sources=sources, **given), told


def look(waiting: WaitingRequests, *reqs: Any, is_decoding: bool = False) -> set[str]:
    return waiting.look(list(reqs), TREE, is_decoding=is_decoding)


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
