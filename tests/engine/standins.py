"""Stand-ins for parts of SGLang and of this extension. They remember their calls.

Each has one meaning in all tests: a request, its planner, a cache with a pool, SGLang's radix tree.
"""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

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
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Source, Sources
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store.pool import Held

TREE: Any = object()
PAGE = 16
NUM_PAGES = 4
"""Number of pages of each request here that may be reused."""
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
"""Settings of a planner for requests that name their block, without a gate."""


UNCOUNTED: Any = SimpleNamespace(count_outcome=lambda *_, **__: None)
"""Metrics of labels that no test counts."""


@dataclass
class Recorded:
    """Labels and their metrics. They record the provenance that requests get, and the seconds that
    each plan saved."""

    notes: list[tuple[str, RequestProvenance]] = field(default_factory=list)
    savings: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> Any:
        return self

    def count_saving(self, plan: Plan, seconds: float) -> None:
        assert plan.num_layers
        self.savings.append(seconds)

    def note(self, req: Any, provenance: RequestProvenance) -> None:
        self.notes.append((req.rid, provenance))

    @property
    def by_rid(self) -> dict[str, RequestProvenance]:
        """Last note of each request."""
        return dict(self.notes)


class Asked:
    """A pool that has some pages, and a cache. Its worker accepts every request, and sends
    nothing."""

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
        """Pages that were noted as approximate."""
        self.namespaces: set[str] = set()
        """Namespaces in which pages were noted or counted."""
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
        assert tree is TREE
        self.where.append((req.rid, num_pages, tree))
        return self.has

    def note_loaded(self, namespace: str, pages: Any) -> None:
        self.namespaces.add(namespace)
        self.loaded += pages
        self.has_approximate = True

    def num_loaded(self, namespace: str, pages: Any) -> int:
        self.namespaces.add(namespace)
        return sum(it in self.loaded for it in pages)

    def land(self, number: int | None = None) -> None:
        """Land all missing steps of the fetch with this number. Without a number, land those of
        every fetch."""
        for staging in self.stagings if number is None else (self.stagings[number],):
            for step in PLAN.steps:
                if not staging.has_landed(step):
                    staging.land(step, STEP_BYTES)


class FakeMeter(SimpleNamespace):
    """A meter that returns the costs with which it was made."""

    def noticed(self, late_s: float) -> None:
        """Do nothing: these tests do not need it."""


METER: Any = FakeMeter(
    recompute=PrefillCost(token_s=1e-3, context_s=0.0),
    prefill=PrefillCost(fixed_s=SAVING_S, token_s=0.0, context_s=0.0),
)


class FakeReq(SimpleNamespace):
    """A request of SGLang. Weak references work; it has no tokens before `refresh_fill_ids`."""

    full_untruncated_fill_ids: Sequence[int] = ()

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = range(NUM_PAGES * PAGE + 1)


def request(rid="r1", lora_id=None, *, n=1, max_new_tokens=8, **fields):
    """Make a request in the queue, with these values of its fields."""
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
    return FakeReq(**known | fields)


class Pair:
    """Agreement of two ranks in one thread. The second rank acts after the first."""

    def __init__(self) -> None:
        self.shared: list[bytes] = []
        self.least: list[list[int]] = []

    def rank(self, number: int) -> Any:
        def least(mine: Any) -> list[int]:
            if number:
                return [*map(min, mine, self.least.pop(0))]
            self.least.append([*mine])
            return [*mine]

        def share(mine: Any, kind: Any) -> Any:
            if number:
                return msgspec.msgpack.decode(self.shared.pop(0), type=kind)
            self.shared.append(msgspec.msgpack.encode(mine))
            return mine

        return SimpleNamespace(is_first=not number, rank=number, least=least, share=share)


class Now:
    """A clock that moves only by a call."""

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


OPTIONAL: Any = planner_of(patience=Patience(saving_s=SAVING_S))
"""Planner that predicts these seconds of saving, so that the server may choose to reuse."""


def planner_without(outcome: str, detail: str = "") -> Any:
    return planner_that(lambda *_: Declined(outcome, detail))


def counting_on(exact: int, approximate: int | None = None) -> Any:
    """Return a pool index that has so many pages of a request on the device."""
    demand = SimpleNamespace(first_page=exact, first_approximate=approximate)
    return SimpleNamespace(demand=demand, matches=())


def server_with(**settings: Any) -> Any:
    """A server without a store to ask, except if a setting names one."""
    known = {
        "hicache_backend": None,
        "fetch_deadline_s": 1e3,
        "max_stall_s": None,
        "gate": "none",
        "min_tokens": 2 * PAGE,
    }
    return SimpleNamespace(settings=SimpleNamespace(**known | settings), page_size=PAGE)


STORE = server_with(hicache_backend="file")


def waiting_with(cache: Asked, **parts: Any) -> tuple[WaitingRequests, Recorded]:
    recorded = Recorded()
    parts: Any = {
        "meter": FakeMeter(recompute=None),
        "labels": recorded,
        "planner": planner_of(**WANTED),
        "followers": SimpleNamespace(
            follow=lambda *_: False, prune=lambda _waiting: None, clear=lambda: None
        ),
        "ranks": Ranks(None),
        **parts,
    }
    server, pool = parts.get("server", server_with()), parts.get("pool", cache)
    sources = Sources(server, cache, pool, SimpleNamespace(page_size=PAGE))  # type: ignore[arg-type]
    return made(WaitingRequests, sources=sources, **parts), recorded


def look(waiting: WaitingRequests, *reqs: Any, is_decoding: bool = False) -> set[str]:
    return waiting.look(list(reqs), TREE, is_decoding=is_decoding)


def begin_load(waiting: WaitingRequests, cache: Asked, req: Any, *keys: str) -> tuple[Any, Any]:
    """Begin the load of these pages, or of all, after all bytes have arrived. Return the load, and
    its slots."""
    cache.land()
    assert not look(waiting, req)
    wanted = keys or keys_of(req)
    slots = torch.arange(len(wanted) * PAGE)
    assert waiting.take(req.rid, wanted, slots)
    (taken,) = waiting.start()
    return taken, slots


def keys_of(req: Any) -> list[str]:
    return [page.hex() for page in own_pages_of(req, NUM_PAGES * PAGE, PAGE)]


def made(part: type, **parts: Any) -> Any:
    """Make a part of the extension. Collaborators that are not named accept any call."""
    names = inspect.signature(part).parameters
    return part(**{name: parts.get(name.lstrip("_"), MagicMock()) for name in names})


def planned_as(plan: Plan, **others: Any) -> Planned:
    """Return a plan that a request names. It leaves KV that other requests may read."""
    fixed = {"is_experiment": False, "patience": Patience(saving_s=math.inf), "step_share": 0.0}
    return Planned(plan=plan, **fixed | others)


def loading(plan: Plan, source: Source, at: Span, slots: torch.Tensor, req: Any) -> Request:
    """Return a request that loads tokens of the plan's pages into these slots."""
    request = Request(req)
    request.take_up(planned_as(plan))
    request.fetch(SimpleNamespace(of=lambda *_: source), None)  # type: ignore[arg-type]
    request.reach(Phase.READY)
    request.begin_load(at, slots)
    return request


@dataclass(frozen=True)
class Named:
    """A stand-in for models: the base's id is its name, and an adapter's id is the adapter's
    name."""

    model_id: ModelId

    def with_adapter(self, digest: str) -> Named:
        return Named(ModelId(digest))


def sglang_tree(core: str, **options: Any) -> UnifiedRadixCache:
    """Make SGLang's own radix tree, over slots that are all free."""
    slots: Any = SimpleNamespace(
        page_size=PAGE, device="cpu", free_segment=lambda _slots, *, start_pos: None
    )
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=slots,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
            **options,
        )
    )


def request_of(tokens: Sequence[int], lora_id: str | None = None, **fields: Any) -> Any:
    """A request with these tokens."""
    return request(lora_id=lora_id, **{"full_untruncated_fill_ids": array("q", tokens)} | fields)
