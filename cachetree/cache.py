"""The public face: one tree, the worker that serves it, and the peers it reads from."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar
from weakref import WeakSet

from cachetree.checkpoint import Family
from cachetree.clock import Clock, Deadline
from cachetree.config import CacheConfig
from cachetree.disk import DiskTier
from cachetree.errors import ConfigError, DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import LOCAL, Kind, Location, ModelId, PageHash, Step
from cachetree.memory import (
    Allocate,
    Budget,
    BudgetedStaging,
    Staging,
    StagingPool,
    pageable,
    pool_of,
)
from cachetree.planning import Link, Match, Plan
from cachetree.status import CacheStatus, FetchLog
from cachetree.tier import MakeTier, NoteSpeed, Search, Tier
from cachetree.transport import (
    Peer,
    Worker,
    verbs,
)
from cachetree.transport.pace import Bandwidth
from cachetree.transport.peer import NO_WORKER
from cachetree.tree import CacheTree, Lease

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Tier)


class Cache:
    """Entries of every model of one family, here and on the peers. `store`, `match`, `fetch`.

    Thread-safe. Raises ConfigError for an address that is wrong or taken, a bad key, or a disk
    directory that is another family's, another process's or cannot be written. A peer that cannot
    be reached is no error: it is tried again, and its entries appear when it comes up.
    """

    def __init__(
        self,
        family: Family,
        config: CacheConfig,
        *,
        tiers: Sequence[MakeTier] = (),
        allocate: Allocate = pageable,
        clock: Clock = time.monotonic,
    ) -> None:
        self.family: Final = family
        self.tree: Final = CacheTree(
            family,
            host_bytes=config.host_bytes,
            memory=pool_of(config.host_bytes, allocate),
            clock=clock,
            retention=config.retention,
        )
        self._clock = clock
        self._budget = Budget(config.staging_bytes)
        self._pool = StagingPool(allocate, config.staging_bytes)
        self._fetch_log = FetchLog(family.page_size)
        self._speeds = {LOCAL: Bandwidth(clock)}
        self._under_way: dict[Location, WeakSet[Staging]] = defaultdict(WeakSet)
        """Fetches by where they read; some may be over."""
        self._worker: Worker | None = None
        self._disk: DiskTier | None = None
        self._tiers: dict[Location, Tier] = {}
        self._peers: dict[Location, Peer] = {}
        self._stores = tuple(map(Location, config.stores))
        try:
            if config.disk_path:
                self._disk = self._add_tier(
                    lambda tree, note: DiskTier(tree, config.disk_of(family), note, clock)
                )
            for make in tiers:
                self._add_tier(make)
            if config.serves:
                self._worker = Worker(
                    self.tree, config.worker, disk=self._disk, sources=self.sources, clock=clock
                )
            own_epoch = self._worker.epoch if self._worker else NO_WORKER
            for address in map(Location, config.peers):
                peer = config.peer_at(address)
                self._peers[address] = Peer(
                    self.tree, address, peer, own_epoch=own_epoch, clock=clock
                )
            for address in self._stores:
                self._peers[address].push()
        except ConfigError:
            self._close_transport()
            self._close_tiers()
            self.tree.memory.close()
            raise
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="cachetree-copy")

    @property
    def address(self) -> Location | None:
        """Where this cache serves others; None where it does not."""
        worker = self._worker
        return worker.address if worker else None

    def store(
        self,
        model: ModelId,
        parent: PageHash | None,
        pages: Sequence[PageHash],
        kv: Sequence[memoryview],
        e: Mapping[int, memoryview],
    ) -> bool:
        """Copy in the exact KV of `pages` (one buffer per layer) and E of some layers.

        Pages that are already here are skipped. False where the budget has no room. Raises
        ValueError for a buffer of the wrong size. To fill pages in place use `tree.reserve`.
        """
        family = self.family
        if len(kv) != family.num_layers:
            raise ValueError(f"KV of {len(kv)} layers for a model of {family.num_layers}")
        buffers = [
            *((Step(Kind.KV, layer), kv[layer]) for layer in range(len(kv))),
            *((Step(Kind.E, layer), e[layer]) for layer in e),
        ]
        for step, buffer in buffers:
            page_bytes = family.page_bytes(step.kind)
            if buffer.nbytes != len(pages) * page_bytes:
                raise ValueError(
                    f"{step.kind.value} of layer {step.layer} has {buffer.nbytes} bytes for "
                    f"{len(pages)} pages of {page_bytes}"
                )
        reservation = self.tree.reserve(model, parent, pages, e.keys())
        if reservation is None:
            return False
        with reservation:
            if reservation.pages:
                for step, buffer in buffers:
                    skipped_bytes = reservation.skipped * family.page_bytes(step.kind)
                    reservation.view(step)[:] = buffer.cast("B")[skipped_bytes:]
            reservation.commit()
        return True

    def knowing(self) -> Callable[[], bool]:
        """Asks whether all who read from here know by now what is stored at this call."""
        return self._worker.knowing() if self._worker is not None else lambda: True

    def match(self, pages: Sequence[PageHash]) -> list[Match]:
        """The longest prefix per model and location: a local walk, also for what peers have."""
        return self.tree.match(pages)

    def search(self, pages: Sequence[PageHash]) -> Sequence[Search]:
        """Ask the tiers that do not advertise; once all are over, `match` knows what they have."""
        searches = [tier.search(pages) for tier in self._tiers.values()]
        return [search for search in searches if not search.is_over]

    def fetch(
        self, plan: Plan, pages: Sequence[PageHash], deadline: Deadline
    ) -> BudgetedStaging | None:
        """Begin to land the steps of `plan` in host memory; returns at once.

        `pages` are all pages of the prompt, of which the plan takes `plan.pages`. None where the
        staging budget is used up: the request does a full prefill. Everything else that goes
        wrong fails the staging.
        """
        num_pages = len(plan.pages)
        sizes = {step: num_pages * self.family.page_bytes(step.kind) for step in plan.steps}
        if not self._budget.take(sum(sizes.values())):
            return None
        try:
            staging = BudgetedStaging(
                sizes,
                deadline,
                self._pool.allocate,
                self._budget,
                partial(self._fetch_log.note, plan),
            )
        except BaseException:
            self._budget.give_back(sum(sizes.values()))
            raise
        self._under_way[plan.location].add(staging)
        wanted = pages[plan.pages.start : plan.pages.stop]
        source = self._tiers.get(plan.location) or self._peers.get(plan.location)
        if len(wanted) != num_pages:
            staging.fail(FetchError(f"the plan takes pages {plan.pages} of {len(pages)}"))
        elif plan.location == LOCAL:
            self._copy(plan.sender, wanted, staging)
            for each in self._tiers.values():
                each.note_use(plan.sender, wanted)
        elif source is None:
            staging.fail(FetchError(f"{plan.location} is not a peer of this server"))
        else:
            source.fetch(plan.sender, wanted, staging)
        return staging

    def link(self, location: Location) -> Link | None:
        """What a fetch from a location takes beside those under way; None where that is unknown."""
        source = self._speeds.get(location) or self._peers.get(location)
        link = source.link if source else None
        if link is None:
            return None
        alive = [it for it in self._under_way[location] if it.error is None]
        rests = [it.num_bytes - it.num_landed_bytes for it in alive]
        return replace(link, backlog=[rest for rest in rests if rest])

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until every peer is ready; False when the time is over or one is refused."""
        deadline = Deadline.after(timeout_s, self._clock)
        return all(peer.wait_ready(deadline.remaining_s()) for peer in self._peers.values())

    def stop_serving(self) -> None:
        """Let nobody read from here any more; what is stored stays, and is fetched as before.

        Fetches by others that are under way fail there.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def sources(self) -> tuple[verbs.Source, ...]:
        """The peers in a few words; from any thread, without waiting."""
        return tuple(peer.status.source for peer in tuple(self._peers.values()))

    def status(self) -> CacheStatus:
        """All of it in numbers, from any thread; it waits for no more than the tree's lock."""
        worker = self._worker
        return CacheStatus(
            num_bytes=self.tree.num_bytes,
            num_pinned_bytes=self.tree.num_pinned_bytes,
            host_bytes=self.tree.host_bytes,
            held_bytes=self.tree.held_bytes,
            num_pages=self.tree.num_pages,
            num_evictions=self.tree.num_evictions,
            staging_bytes_in_use=self._budget.num_bytes,
            staging_bytes=self._budget.limit_bytes,
            fetches=self._fetch_log.counts(),
            peers=tuple(peer.status for peer in self._peers.values()),
            stores=tuple(self._peers[address].push_status for address in self._stores),
            worker=worker.status() if worker else None,
            worker_turn_age_s=worker.turn_age_s if worker else 0.0,
            disk=self._disk.status() if self._disk else None,
            tiers={location: tier.status() for location, tier in self._tiers.items()},
        )

    def close(self) -> None:
        """Stop serving and fetching; fetches under way fail. Idempotent.

        What a store has not been given or a tier has not written yet still is, for a few seconds
        at most.
        """
        self._close_transport()
        self._copier.shutdown(cancel_futures=False)
        self._close_tiers()
        self.tree.memory.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_transport(self) -> None:
        for peer in self._peers.values():
            peer.close()
        if self._worker is not None:
            self._worker.close()

    def _close_tiers(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _add_tier(self, make: Callable[[CacheTree, NoteSpeed], T]) -> T:
        speed = Bandwidth(self._clock)

        def note(num_bytes: int, seconds: float) -> None:
            if num_bytes >= Bandwidth.MIN_SAMPLE_BYTES:
                speed.sample(num_bytes, seconds)

        tier = make(self.tree, note)
        self._tiers[tier.location] = tier
        self._speeds[tier.location] = speed
        return tier

    def _copy(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        lease = self.tree.lease(model, pages, "a local fetch", staging.deadline, is_use=False)
        if lease is None:
            staging.fail(StaleEntry(f"{len(pages)} pages of model {model} are no longer here"))
            return
        try:
            self._copier.submit(self._copy_steps, lease, staging)
        except RuntimeError:  # The pool is shut down.
            lease.release()
            staging.fail(FetchError("this cache is closed"))

    def _copy_steps(self, lease: Lease, staging: Staging) -> None:
        """In the copier's thread: fill `staging` from memory, step by step."""
        begun_at_s = self._clock()
        try:
            with lease:
                for step in staging.steps:
                    if staging.deadline.has_passed:
                        raise DeadlineExceeded("the local copy did not end in time")
                    offset = 0
                    for view in lease.views(step):
                        staging.write(step, offset, view)
                        offset += view.nbytes
            if staging.num_bytes >= Bandwidth.MIN_SAMPLE_BYTES:
                self._speeds[LOCAL].sample(staging.num_bytes, self._clock() - begun_at_s)
        except FetchError as exc:
            staging.fail(exc)
        except Exception as exc:
            log.exception("a local copy failed")
            staging.fail(FetchError(f"internal error: {exc}"))
