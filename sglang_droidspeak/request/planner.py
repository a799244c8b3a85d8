"""Plan one request: which models it may read from, which pages they have, and at what cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from cachetree import LOCAL, Cache, Location, ModelId, PageHash, Span, is_pool
from cachetree.checkpoint import Codec
from cachetree.planning import (
    FREE_LINK,
    Considered,
    Costs,
    Demand,
    Gate,
    Link,
    Match,
    NoReuse,
    PairProfile,
    Patience,
    Plan,
    PlanId,
    Profiles,
    Reason,
    bytes_of,
    choose,
    copy_s,
    full_prefill_s,
    index_profiles,
    layers_of_work,
    patience_for,
    recompute_s,
    saving_s,
)
from cachetree.transport import PeerState, Source
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.models import Models, Owner
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import asking, prefixes
from sglang_droidspeak.engine.names import Req, UnifiedRadixCache
from sglang_droidspeak.request.controls import name_of, parse_controls
from sglang_droidspeak.request.heads import MAX_HEAD, SharedHeads
from sglang_droidspeak.request.outcomes import OUT_OF_SERVICE
from sglang_droidspeak.start.config import GIB
from sglang_droidspeak.start.this_server import ThisServer
from sglang_droidspeak.store.pool import Held, PoolIndex, pool_of

log = logging.getLogger(__name__)

UNMEASURED_S: Final = 0.2
"""Seconds that reuse is assumed to save until the device's speed has been measured."""

_TAKES_WHAT_IS_THERE: Final = frozenset(
    it.value for it in Reason if it not in (Reason.OFF, Reason.UNGATED_BLOCK)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for one request, with the inputs from which it was chosen."""

    plan: Plan
    is_experiment: bool
    """Whether the request named the block and `gate: none` allowed it without a check. Only this
    request uses the KV."""
    patience: Patience
    """Limit of the request's wait for its fetch. Infinite if the request named the block."""
    step_share: float
    """Cost of recompute and copies of one loaded token, in tokens of a scheduler step's budget."""
    considered: Considered | None = None
    """Inputs of the choice among plans. None if another rank made the plan."""

    @property
    def demand(self) -> Demand | None:
        """Needs of the request, by which this rank later checks whether the plan still saves time.
        None if the request named the block, or another rank makes the check."""
        is_optional = self.considered is not None and self.patience.saving_s < math.inf
        return self.considered.demand if is_optional else None

    @property
    def saving_s(self) -> float:
        """Seconds that the plan was predicted to save; 0 while the device's speed is unknown."""
        considered = self.considered
        if considered is None:
            return 0.0
        return saving_s(self.plan, considered.demand, considered.costs) or 0.0

    @property
    def is_approximate(self) -> bool:
        """Whether SGLang reads and inserts the request's prefix among approximate KV."""
        return not (self.plan.is_exact or self.is_experiment)


@dataclass(frozen=True, slots=True)
class Declined:
    """Decision to make no plan: the outcome for `meta_info`, and a detail for people."""

    outcome: str
    detail: str = ""
    considered: Considered | None = None
    """Inputs of the choice among plans. None if there was no choice."""

    @property
    def may_be_approximate(self) -> bool:
        """Whether the request may still read approximate KV on the device, from earlier reuse."""
        return self.outcome in _TAKES_WHAT_IS_THERE


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a plan without its transfer. Seconds are None while the device's speed is unknown."""

    num_tokens: int
    full_prefill_s: float | None
    recompute_s: float | None
    e_bytes: int
    kv_bytes: int


@dataclass(eq=False)
class Planner:
    """Plan requests one by one. Scheduler thread only, except methods that say otherwise."""

    _server: ThisServer
    _cache: Cache
    _meter: Meter
    _models: Models
    _activated: ActivatedAdapters
    _pool: PoolIndex
    profiles: dict[tuple[ModelId, ModelId], PairProfile] = field(init=False)
    failed: frozenset[tuple[ModelId, ModelId]] = field(init=False)
    """Pairs with a profile that did not pass its gate."""
    _generation: int = field(default=0, init=False)
    """Number of changes to the plans in service."""
    out_of_service: frozenset[PlanId] = field(default=frozenset(), init=False)
    """Plans that the drift guard has stopped. A request cannot use them even with `gate: none`."""
    heirs: Mapping[tuple[ModelId, ModelId], str] = field(default_factory=dict, init=False)
    """Pairs that may inherit a line's plan, with their states (`WatchedPair.state`)."""
    _heads: SharedHeads = field(default_factory=SharedHeads, init=False)
    off: str = field(default="", init=False)
    """Outcome of every request since droidspeak turned itself off: `loader_failed`. Empty
    before."""

    def __post_init__(self) -> None:
        self.profiles = dict(index_profiles(self._server.profiles))
        self.failed = frozenset(it for it, of in self.profiles.items() if not of.is_usable)
        self._min_pages = -(-self._server.settings.min_tokens // self._server.page_size)

    def put_in_service(self, profile: PairProfile) -> None:
        """Replace the profile of a pair. Later requests read no older approximate KV."""
        self.profiles[profile.sender.model_id, profile.receiver.model_id] = profile
        self._generation += 1

    def inherit(self, heirs: Profiles) -> None:
        """Replace the pairs that may inherit a plan. Later requests read no older approximate
        KV."""
        own = {pair: it for pair, it in self.profiles.items() if pair not in self.heirs}
        self.profiles, self._generation = own | dict(heirs), self._generation + 1

    def meet(self, req: Req) -> None:
        """Find the token from which the request's adapter acts. Choose the request's namespaces by
        weights, tenant, plans in service and head. Called on all ranks each time the request is
        seen, while it holds nothing of SGLang's tree."""
        if self._models.generation:
            prefixes.run_with(req, self._models.generation, self._models.place)
        self._activated.meet(req)  # First: this may let the base answer the request.
        prefixes.keep_apart(req, self._models.ids)
        if self._generation:
            prefixes.join(req, str(self._generation))
        if self._has_heads and not prefixes.has_head(req):
            prefixes.lead(req, self._heads.length(self._first_pages(req)))

    def note(self, req: Req) -> None:
        """Count the first pages of a user's request, which may become a head. Called before `meet`,
        on all ranks, each time the request is seen."""
        if self._has_heads and not asking.is_own(req):
            self._heads.note(self._first_pages(req))

    @property
    def _has_heads(self) -> bool:
        """Whether any request may read approximate KV."""
        return bool(self.profiles) or self._cache.family.codec is not Codec.NONE

    def _first_pages(self, req: Req) -> list[PageHash]:
        page_size = self._server.page_size
        num_tokens = min(len(req.full_untruncated_fill_ids), (MAX_HEAD + 1) * page_size)
        return prefixes.pages_of(req, num_tokens, page_size, req.lora_id or "")

    @property
    def why_off(self) -> str:
        """Outcome that every request gets while no plans are made. Empty while plans are made."""
        return self.off or self._models.unknown

    def serves(self, model: ModelId) -> bool:
        """Whether this server now answers as this model."""
        return model in self._models.ids_now

    def model_of(self, lora_id: str | None) -> ModelId | None:
        """Model id of a loaded adapter, or of the base. None if its content is not known."""
        return self._models.of(lora_id)

    def held(self, req: Req, tree: UnifiedRadixCache) -> Held:
        """Return how many pages the device has for a request. Call `meet` first."""
        num_pages = len(prefixes.reusable_pages(req, self._server.page_size))
        return self._pool.held(req, num_pages, tree)

    def refusal(self, req: Req) -> str:
        """Return why a request can have no plan, even if a peer has its pages. Empty if a plan is
        possible."""
        return self.why_off or prefixes.refusal(req)

    def plan(
        self, req: Req, pages: Sequence[PageHash], tree: UnifiedRadixCache, num_waiting: int
    ) -> Planned | Declined:
        owner = self._models.owner_of(req)
        if owner is None:
            is_reading = self._models.is_reading(req.lora_id)
            return Declined("reading_adapter" if is_reading else "unknown_adapter")
        num_pages, page_size = len(pages), self._server.page_size
        pages = owner.pages_of(pages, page_size)
        try:
            controls = parse_controls(req.sampling_params.custom_params)
            requested = controls.requested(self._server.identity.num_layers)
        except ValueError as exc:
            log.warning("request %s: %s; it does a full prefill", name_of(req.rid), exc)
            return Declined("bad_controls", str(exc))
        if controls.mode == "off":
            return Declined(Reason.OFF.value)
        if num_pages < self._min_pages <= (len(req.full_untruncated_fill_ids) - 1) // page_size:
            return Declined("logprobs", "a prompt's log-probabilities take its prefill")
        matches = controls.preferred(self._matches(req, pages))
        if not matches:
            return Declined(Reason.NO_MATCH.value, not_ready(self._cache.sources()))
        demand = replace(self.demand(req, owner, len(pages), tree), num_waiting=num_waiting)
        while True:
            costs = self.costs({it.location for it in matches})
            considered = Considered(demand, matches, costs)
            plan = choose(demand, matches, self.profiles, costs)
            if isinstance(plan, NoReuse):
                return Declined(plan.reason.value, plan.detail, considered)
            if self.out_of_service and plan.id in self.out_of_service:
                return Declined(Reason.GATE_FAILED.value, OUT_OF_SERVICE)
            if not is_pool(plan.location) or self._pool.has(plan, pages, req, tree):
                break
            # The pool's note was wrong and is corrected.
            matches = controls.preferred(self._matches(req, pages))
        if self._server.settings.gate == "none":
            plan = replace(plan, strategy=controls.strategy)
        is_asked_for = requested.block is not None
        return Planned(
            plan=plan,
            is_experiment=demand.first_approximate is None,
            patience=(
                Patience(saving_s=math.inf) if is_asked_for else _patience(plan, demand, costs)
            ),
            step_share=self._step_share(plan, costs),
            considered=considered,
        )

    def still_saves(self, plan: Plan, demand: Demand, held: Held) -> bool:
        """Whether a fetched plan is worth its recompute and copies, given the pages that the device
        has now. True while the device's speed is unknown."""
        is_exact = plan.is_exact or demand.first_approximate is None
        start = max(plan.pages.start, held.exact if is_exact else held.approximate)
        if start >= plan.pages.stop:
            return True  # SGLang finds all pages on the device, and nothing is loaded.
        approximate = None if demand.first_approximate is None else held.approximate
        demand = replace(demand, first_page=held.exact, first_approximate=approximate)
        head = Span(min(held.approximate, plan.head.stop), plan.head.stop)
        left = replace(plan, pages=Span(start, plan.pages.stop), head=head)
        costs = self.costs({plan.location})
        links = {it: replace(link, byte_s=0.0, fixed_s=0.0) for it, link in costs.links.items()}
        saved_s = saving_s(left, demand, replace(costs, links=links))
        return saved_s is None or saved_s > 0

    def would_save_s(
        self, demand: Demand, num_there: int, sender: ModelId, location: Location, *, exactly: bool
    ) -> float:
        """Predict the seconds that a request would save if `sender` had the prompt's first
        `num_there` pages at `location`, with E. 0 if the request would not reuse these pages. With
        `exactly`, only exact reuse counts."""
        e_pages = dict.fromkeys(self._server.transition_layers, num_there)
        match = Match(model=sender, location=location, num_pages=num_there, e_pages=e_pages)
        costs = self.costs({location})
        plan = choose(demand, [match], self.profiles, costs)
        if isinstance(plan, NoReuse) or (exactly and not plan.is_exact):
            return 0.0
        return _patience(plan, demand, costs).saving_s

    def price(self, plan: Plan) -> Price:
        """Predict the cost of a plan without its transfer."""
        costs, tokens = self.costs(()), self._server.page_size
        pages = Span(plan.pages.start * tokens, plan.pages.stop * tokens)
        e_bytes, kv_bytes = bytes_of(plan, costs)
        return Price(
            num_tokens=len(pages),
            full_prefill_s=full_prefill_s(pages, costs.prefill),
            recompute_s=recompute_s(plan, tokens, costs.recompute),
            e_bytes=e_bytes,
            kv_bytes=kv_bytes,
        )

    def _step_share(self, plan: Plan, costs: Costs) -> float:
        """Return `Planned.step_share` of a plan. With `max_stall_ms`, recompute and copies of this
        length use up the whole budget of a scheduler step."""
        step, most_s = self._meter.step_tokens, self._server.settings.max_stall_s
        work, num_tokens = layers_of_work(plan), len(plan.pages) * self._server.page_size
        copies_s = copy_s(plan, costs) * step / num_tokens
        if most_s is not None:
            layer_s = costs.recompute.seconds(0, step) if costs.recompute else 0.0
            return (work * layer_s + copies_s) / most_s
        step_s = costs.prefill.seconds(0, step) if costs.prefill else math.inf
        return work / plan.num_layers + copies_s / step_s

    def _matches(self, req: Req, pages: Sequence[PageHash]) -> list[Match]:
        """Return which pages other locations and models have. SGLang itself finds this model's
        pages on the device."""
        mine = pool_of(prefixes.namespace_of(req))
        return [it for it in self._cache.match(pages) if it.location != mine]

    def demand(self, req: Req, owner: Owner, num_pages: int, tree: UnifiedRadixCache) -> Demand:
        """Return the needs of a request that may reuse its first `num_pages` pages. The caller sets
        `num_waiting`. Raises ValueError for wrong controls."""
        usual, controls = self.usual(owner.model), parse_controls(req.sampling_params.custom_params)
        requested, target_ms = controls.requested(usual.num_layers), controls.ttft_target_ms
        held = self._pool.held(req, num_pages, tree)
        differences = self._models.first_differences(owner.lora_id)
        if not self._server.has_blocks:
            differences = {it: at for it, at in differences.items() if at == usual.num_layers}
        # An experiment continues from exact KV, and no other request reads its KV.
        is_experiment = requested.block is not None and self._server.settings.gate == "none"
        return replace(
            usual,
            num_pages=num_pages,
            first_page=held.exact,
            first_approximate=None if is_experiment else held.approximate,
            num_head=prefixes.num_head(req),
            num_new_tokens=len(req.full_untruncated_fill_ids) - num_pages * usual.page_size,
            ttft_target_s=target_ms / 1000 if target_ms else usual.ttft_target_s,
            requested=requested,
            first_differences=differences,
        )

    def usual(self, model: ModelId) -> Demand:
        """Return the needs that all requests to `model` have by the settings. Thread-safe."""
        server, settings = self._server, self._server.settings
        target_ms = settings.ttft_target_ms
        return Demand(
            receiver=model,
            num_layers=server.identity.num_layers,
            page_size=server.page_size,
            num_pages=0,
            min_pages=self._min_pages,
            ttft_target_s=target_ms / 1000 if target_ms else None,
            gate=Gate(settings.gate),
            max_recompute_tokens=settings.max_recompute_tokens,
            max_stall_s=settings.max_stall_s,
            max_fetch_bytes=int(settings.staging_gb * GIB),
            is_lossy=self._cache.family.codec is not Codec.NONE,
        )

    def costs(self, locations: Collection[Location]) -> Costs:
        """Return the costs of reading from these locations. Thread-safe."""
        return Costs(
            kv_page_bytes=self._cache.family.kv_page_bytes,
            e_page_bytes=self._cache.family.e_page_bytes,
            prefill=self._meter.prefill,
            recompute=self._meter.recompute,
            links={it: self._link(it) for it in locations if not is_pool(it)},
        )

    def _link(self, location: Location) -> Link:
        """Return the link to a location, with the time until a scheduler step notices the end of a
        fetch. For this server's own memory, which needs no fetch, this time is 0."""
        link = self._cache.link(location) or FREE_LINK
        notice_s = 0.0 if location == LOCAL else self._meter.notice_s
        copy_byte_s = self._meter.copy_byte_s
        return replace(link, fixed_s=link.fixed_s + notice_s, copy_byte_s=copy_byte_s)


def not_ready(sources: Sequence[Source]) -> str:
    """Return a text such as `1 of 2 peers not ready`; empty if all are ready."""
    num_late = sum(it.state != PeerState.READY for it in sources)
    return f"{num_late} of {len(sources)} peers not ready" if num_late else ""


def absence_of(location: Location, sources: Sequence[Source]) -> str:
    """Return why a peer sends nothing now; empty if it is ready."""
    late = (it for it in sources if it.address == location and it.state != PeerState.READY)
    return next((f"{it.address}: {it.reason or it.state}" for it in late), "")


def _patience(plan: Plan, demand: Demand, costs: Costs) -> Patience:
    return patience_for(plan, demand, costs) or Patience(saving_s=UNMEASURED_S)
