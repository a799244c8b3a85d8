"""The class `Cache`: one tree, the worker that serves it, its tiers, and its peers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from cachetree.checkpoint import Family
from cachetree.clock import Clock, Deadline
from cachetree.config import CacheConfig
from cachetree.disk import DiskTier
from cachetree.errors import DeadlineExceeded, FetchError, StaleEntry
from cachetree.ids import KV, LOCAL, Kind, Location, ModelId, PageHash, Part, Step, part_of
from cachetree.memory import Arena, Blocks, NoRoom, Register, Staging, scatter, staged, unregistered
from cachetree.names import ModelNames
from cachetree.planning import Link, Match, Plan
from cachetree.status import CacheStatus, FetchLog
from cachetree.tier import MakeTier, NoteSpeed, Search, Tier, Unwritten
from cachetree.transport import Keeper, Peers, Worker, is_directory, verbs
from cachetree.transport.pace import Bandwidth
from cachetree.transport.tracing import NoteServed, untraced
from cachetree.tree import CacheTree

T = TypeVar("T", bound=Tier)

_UNSEEN_BYTES: Final = 1 << 40
"""Value of `Link.frame_bytes` for tiers: larger than any fetch. A tier reads whole transfer steps,
so a running fetch shows no rate before its end."""


class Cache:
    """Cached KV and E of all models of one family. `store` adds, `match` finds, `fetch` reads.

    Entries are in this process's memory, in its tiers (such as a disk) and on peers. All memory is
    allocated at the start; `register` registers it with a device.

    Thread-safe. Raises ConfigError for a wrong or taken address, a bad key, or memory that cannot
    be allocated or registered. It does so, too, for a disk directory that belongs to another
    family, is in use, or is not writable. An unreachable peer is no error: the cache tries it again
    later.
    """

    def __init__(
        self,
        family: Family,
        config: CacheConfig,
        *,
        tiers: Sequence[MakeTier] = (),
        register: Register = unregistered,
        clock: Clock = time.monotonic,
        note_served: NoteServed = untraced,
    ) -> None:
        self.family: Final = family
        self.tree: Final = CacheTree(
            family,
            host_bytes=config.host_bytes,
            memory=Arena(config.host_bytes, register),
            clock=clock,
            retention=config,
        )
        self._clock = clock
        self._arriving = Arena(config.staging_bytes, register)
        self._staging_bytes: Final = config.staging_bytes
        self._fetch_log = FetchLog(family.page_size, self.tree.names)
        self._speeds: dict[Location, Bandwidth] = {}
        self._under_way: WeakKeyDictionary[Staging, Location] = WeakKeyDictionary()
        """Location from which each fetch reads, with the fetch's staging memory as key. Fetches
        that have ended may still be listed."""
        self._under_way_lock = threading.RLock()
        self._is_closed = False
        self._worker: Worker | None = None
        self._disk: DiskTier | None = None
        self._tiers: dict[Location, Tier] = {}
        self._peers = Peers(self.tree, None, clock)
        try:
            if config.disk_path:
                path, num_bytes = config.disk_of(family.tp_rank, family.tp_size), config.disk_bytes
                self._disk = self._add_tier(
                    lambda tree, note: DiskTier(tree, path, num_bytes, note, clock)
                )
            for make in tiers:
                self._add_tier(make)
            if config.serves:
                self._worker = Worker(
                    self.tree,
                    config.worker,
                    disk=self._disk,
                    sources=self.sources,
                    clock=clock,
                    note_served=note_served,
                )
            cap = (config.max_pull_mb_s or inf) * 1e6
            unwritten = self._disk.unwritten if self._disk else Unwritten()
            keeper = Keeper(self.tree, cap, unwritten, clock) if config.keeps else None
            self._peers = Peers(self.tree, self._worker, clock, keeper)
            # A directory may name workers that are listed, too; listed workers stay.
            for address in map(Location, config.sources):
                if not is_directory(address):
                    self._peers.add(address, config.peer_at(address))
            for url in filter(is_directory, config.sources):
                self._peers.watch(url, config.peer_at(url))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> ModelNames:
        """Readable name of each model id. Thread-safe."""
        return self.tree.names

    @property
    def address(self) -> Location | None:
        """Address at which this cache serves other servers. None if it serves none."""
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
        """Copy exact KV of `pages` (one buffer per layer) and E of some layers into memory.

        `parent` is the page before `pages`, or None. Pages that are already stored are skipped.
        Returns False if the budget has no room, or if `parent` is not stored with the same parts.
        Raises ValueError for a buffer of the wrong size. To fill pages in place use `tree.reserve`.
        """
        family = self.family
        if len(kv) != family.num_layers:
            raise ValueError(f"KV of {len(kv)} layers for a model of {family.num_layers}")
        buffers = {
            **{Step(Kind.KV, layer): buffer for layer, buffer in enumerate(kv)},
            **{Step(Kind.E, layer): buffer for layer, buffer in e.items()},
        }
        for step, buffer in buffers.items():
            page_bytes = family.page_bytes(step.kind)
            if buffer.nbytes != len(pages) * page_bytes:
                raise ValueError(
                    f"{step.kind.value} of layer {step.layer} has {buffer.nbytes} bytes for "
                    f"{len(pages)} pages of {page_bytes}"
                )
        for part in (KV, *map(Part, sorted(e))):
            reservation = self.tree.reserve(model, parent, pages, part)
            if reservation is None:
                return False
            with reservation:
                for step in reservation.steps:
                    skipped_bytes = reservation.skipped * family.page_bytes(step.kind)
                    scatter(reservation.views(step), buffers[step].cast("B")[skipped_bytes:])
                reservation.commit()
        return True

    def bring_e(
        self, model: ModelId, pages: Sequence[PageHash], layer: int, deadline: Deadline
    ) -> bool:
        """Copy E of a prompt's first pages from a tier or a peer into this process's memory.
        Blocks.

        Return whether this succeeded. KV of the same pages must be in memory already. E of later
        pages can be stored only after E of these.
        """
        step = Step(Kind.E, layer)
        for match in self.match(pages):
            source = self._tiers.get(match.location) or self._peers.now.get(match.location)
            has_all = match.model == model and match.e_pages.get(layer, 0) == len(pages)
            if source is None or not has_all:
                continue
            reservation = self.tree.reserve(model, None, pages, part_of(step))
            if reservation is None:
                return False
            with reservation, contextlib.suppress(FetchError):
                num_bytes = len(reservation.pages) * self.family.page_bytes(Kind.E)
                views = {step: reservation.views(step)}
                with Staging({step: num_bytes}, deadline, views) as staging:
                    source.fetch(model, reservation.pages, staging)
                    staging.wait(step)
                reservation.commit()
                return True
        return False

    def knowing(self) -> Callable[[], bool]:
        """Return a function that returns True once connected peers know all entries stored so
        far."""
        worker = self._worker  # `stop_serving` removes the worker.
        return worker.knowing() if worker is not None else lambda: True

    def match(self, pages: Sequence[PageHash]) -> list[Match]:
        """Return the longest stored prefix for each model and location, peers included.

        Reads only this process's tree, which also lists the entries of peers. Counts as a use of
        the matched entries.
        """
        paused = {location for location, tier in self._tiers.items() if tier.is_paused}
        matches = self.tree.match(pages)
        return [it for it in matches if it.location not in paused]

    def search(self, pages: Sequence[PageHash]) -> Sequence[Search]:
        """Let tiers look for `pages` that the tree does not list. Return the searches that still
        run. Once they are over, `match` includes the entries that they have found."""
        searches = [tier.search(pages) for tier in self._tiers.values()]
        return [search for search in searches if not search.is_over]

    def fetch(
        self, plan: Plan, pages: Sequence[PageHash], deadline: Deadline, traceparent: str = ""
    ) -> Staging | None:
        """Start to read the transfer steps of `plan` into staging memory. Returns at once.

        `pages` has all pages of the prompt; the plan takes the span `plan.pages` of them. Returns
        None if the staging budget is used up: the request then does a full prefill. After any other
        problem the returned staging fails. Pages in this cache's own memory are not copied: their
        staging is complete at once.
        """
        wanted = pages[plan.pages.start : plan.pages.stop]
        parts = {it: Blocks(len(plan.pages), self.family.page_bytes(it.kind)) for it in plan.steps}
        sizes = {step: num * size for step, (num, size) in parts.items()}
        note_end = partial(self._fetch_log.note, plan)
        try:
            if self._is_closed:
                raise FetchError("this cache is closed")
            if len(wanted) != len(plan.pages):
                raise FetchError(f"the plan takes pages {plan.pages} of {len(pages)}")
            if plan.location == LOCAL:
                return self._in_place(plan, wanted, deadline)
        except FetchError as exc:
            staging = Staging(sizes, deadline, {}, note_end)
            staging.fail(exc)
            return staging
        with self._under_way_lock:
            if self._bytes_under_way() + sum(sizes.values()) > self._staging_bytes:
                return None
            try:
                staging = staged(self._arriving, parts, deadline, note_end)
            except NoRoom:  # The writer of a released fetch still uses its memory.
                staging = Staging(sizes, deadline, note_end=note_end)
            self._under_way[staging] = plan.location
        staging.traceparent = traceparent
        source = self._tiers.get(plan.location) or self._peers.now.get(plan.location)
        if source is None:
            staging.fail(FetchError(f"{plan.location} is not a peer of this server"))
        else:
            source.fetch(plan.sender, wanted, staging)
        return staging

    def _in_place(self, plan: Plan, wanted: Sequence[PageHash], deadline: Deadline) -> Staging:
        """Lease local pages for a plan. Return a staging that is complete at once, without a copy.

        Raises FetchError if a page is gone or the deadline has passed. The staging's views keep
        their bytes until the staging is released, even if the lease ends earlier.
        """
        if deadline.has_passed:
            raise DeadlineExceeded("the local fetch did not begin in time")
        parts = {part_of(step) for step in plan.steps}
        lease = self.tree.lease(plan.sender, wanted, "a local fetch", deadline, parts, is_use=False)
        if lease is None:
            raise StaleEntry(f"{len(wanted)} pages of model {plan.sender} are no longer here")
        try:
            views = {step: lease.views(step) for step in plan.steps}
        except StaleEntry:
            lease.release()
            raise
        for tier in self._tiers.values():
            tier.note_use(plan.sender, wanted, parts)

        def end(staging: Staging) -> None:
            lease.release()
            self._fetch_log.note(plan, staging)

        sizes = {step: sum(view.nbytes for view in of) for step, of in views.items()}
        staging = Staging(sizes, deadline, views, end)
        for step, size in sizes.items():
            staging.land(step, size)
        return staging

    def _bytes_under_way(self) -> int:
        """Return the bytes of all fetches that are not yet released."""
        with self._under_way_lock:
            return sum(it.num_bytes for it in self._under_way if not it.is_released)

    def link(self, location: Location) -> Link | None:
        """Return the link to a location: its speed, and the running fetches that a new fetch has to
        share it with or wait for. None if the speed is unknown."""
        source = self._speeds.get(location) or self._peers.now.get(location)
        link = source.link if source else None
        if link is None:
            return None
        with self._under_way_lock:
            fetches = [it for it, at in self._under_way.items() if at == location]
        rests = sorted(it.num_bytes - it.num_landed_bytes for it in fetches if it.error is None)
        backlog = [rest for rest in rests if rest]
        tier = self._tiers.get(location)
        if tier is None:
            return replace(link, backlog=backlog)
        num_ahead = max(0, len(backlog) - tier.num_readers + 1)
        first, longest = sum(backlog[:num_ahead]), backlog[num_ahead:]
        meanwhile = [min(rest, first) for rest in longest]  # Read while `first` is read.
        backlog = [rest - read for rest, read in zip(longest, meanwhile, strict=True)]
        ahead = first + sum(meanwhile)
        return replace(link, ahead=ahead, backlog=backlog, frame_bytes=_UNSEEN_BYTES)

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until every peer is ready. Return False if `timeout_s` passes first, or if the
        connection to a peer fails."""
        return self._peers.wait_ready(Deadline.after(timeout_s, self._clock))

    def run(self, model: ModelId) -> None:
        """Announce that this server now runs `model`; an empty id means that it runs none. A peer
        learns of it at its next handshake."""
        if self._worker is not None:
            self._worker.run(model)

    def stop_serving(self) -> None:
        """Stop serving other servers. Stored entries stay, and this cache can still fetch.

        Running fetches by other servers fail on their side.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def sources(self) -> tuple[verbs.Source, ...]:
        """Return the peers, and the DNS names that list peers, each with its state in a few words.
        Does not wait. Thread-safe."""
        return self._peers.sources()

    def status(self) -> CacheStatus:
        """Return the state of the cache in numbers. Waits only for the tree's lock. Thread-safe."""
        worker, peers = self._worker, self._peers.now
        of_worker = worker.status() if worker else None
        tiers = {location: tier.status() for location, tier in self._tiers.items()}
        return CacheStatus(
            num_bytes=self.tree.num_bytes,
            host_bytes=self.tree.host_bytes,
            held_bytes=of_worker.held_bytes if of_worker else self.tree.held_bytes,
            num_pages=self.tree.num_pages,
            num_evictions=self.tree.num_evictions,
            staging_bytes_in_use=self._bytes_under_way(),
            staging_bytes=self._staging_bytes,
            fetches=self._fetch_log.counts({LOCAL, *self._tiers, *peers}),
            peers=tuple(peer.status for peer in peers.values()),
            worker=of_worker,
            worker_turn_age_s=worker.turn_age_s if worker else 0.0,
            disk=self._disk.status() if self._disk else None,
            tiers=tiers,
            paused_tiers={location: tier.is_paused for location, tier in self._tiers.items()},
        )

    def close(self) -> None:
        """Stop serving and fetching. Running fetches fail. Idempotent.

        Tiers still write their waiting entries, for a few seconds at most.
        """
        self._is_closed = True
        self._peers.close()
        if self._worker is not None:
            self._worker.close()
        for tier in self._tiers.values():
            tier.close()
        self.tree.memory.close()
        self._arriving.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_tier(self, make: Callable[[CacheTree, NoteSpeed], T]) -> T:
        speed, lock = Bandwidth(self._clock), threading.Lock()

        def note(num_bytes: int, seconds: float, error: FetchError | None) -> None:
            with lock:  # A tier may read in several threads.
                speed.note(num_bytes, seconds, error)

        tier = make(self.tree, note)
        self._tiers[tier.location] = tier
        self._speeds[tier.location] = speed
        return tier
