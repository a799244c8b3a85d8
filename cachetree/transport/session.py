"""What a worker knows about one peer that has greeted it, and what its requests wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier
from cachetree.errors import FetchError, ProtocolError, StaleEntry
from cachetree.ids import PAGE_HASH_BYTES, ModelId, PageHash
from cachetree.transport.advertise import Advertiser
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES
from cachetree.transport.receiver import StoreReceiver
from cachetree.transport.sender import Load, Stream
from cachetree.transport.verbs import Counts
from cachetree.transport.wire import Fetch, Store, ToPeer, encode, pages_of, steps_of
from cachetree.tree import CacheTree, Lease

DRAIN_S: Final = 5.0
"""A lease outlives its stream's deadline by this, for frames that the kernel does not take yet.
Later the tree may count the bytes as free; the memory itself stays until they are gone."""


class Session:
    """One peer's streams and its subscription. Used by the worker's thread only."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        tree: CacheTree,
        advertiser: Advertiser,
        stores: StoreReceiver,
        clock: Clock,
    ) -> None:
        self.name: Final = name
        self.channel: Final = channel
        self.heard_at_s = clock()
        self.streams: dict[int, Stream] = {}
        self.advertiser: Final = advertiser
        self.stores: Final = stores
        self._tree = tree
        self._clock = clock
        self.promotions: set[Fetch | Store] = set()
        """Those that wait for pages to be read from disk."""
        self._last_id = 0

    def tell(self, message: ToPeer) -> None:
        """Dropped where the channel is over."""
        self.channel.put_message(encode(message))

    def advertise(self, most: int) -> None:
        """Tell the peer what is new in the tree, in at most so many messages."""
        for _ in range(most):
            if not self.channel.has_room or (advert := self.advertiser.next()) is None:
                return
            self.tell(advert)

    def admit(self, fetch: Fetch) -> None:
        """Raise ProtocolError for one that is not the newest."""
        if fetch.id <= self._last_id:
            raise ProtocolError(f"fetch {fetch.id} comes after fetch {self._last_id}")
        self._last_id = fetch.id

    def open(self, fetch: Fetch, config: WorkerConfig, deadline: Deadline) -> Stream:
        """Lease what a fetch names; raises StaleEntry or ProtocolError."""
        family = self._tree.family
        pages = pages_of(fetch.pages)
        steps = steps_of(fetch, family.num_layers)
        if not pages or not steps:
            raise ProtocolError("a fetch names no pages or no steps")
        if not MIN_FRAME_BYTES <= fetch.frame_bytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"a fetch asks for frames of {fetch.frame_bytes} bytes")
        lease = self._lease(fetch, pages, deadline)
        try:
            stream = Stream(
                fetch.id,
                Load(lease, steps),
                fetch.frame_bytes,
                deadline,
                first=(fetch.first_step, fetch.first_offset),
                arena=self._tree.memory if fetch.reads_arena and config.shared_memory else None,
            )
        except FetchError:
            lease.release()
            raise
        self.streams[fetch.id] = stream
        return stream

    def cancel(self, id: int) -> bool:
        """The peer gives up what has that id; whether a stream of it ends."""
        self.stores.cancel(id)
        self.promotions = {it for it in self.promotions if it.id != id}
        stream = self.streams.get(id)
        if stream is not None:
            stream.end()
        return stream is not None

    def late(self) -> list[int]:
        """The streams whose deadline has passed."""
        return [id for id, it in self.streams.items() if it.deadline.has_passed and not it.is_over]

    def close(self) -> None:
        """End everything; the streams still have to drain."""
        self.stores.close()
        self.promotions.clear()
        for stream in self.streams.values():
            stream.end()
        self.advertiser.close()

    def _lease(self, fetch: Fetch, pages: tuple[PageHash, ...], deadline: Deadline) -> Lease:
        until = Deadline(deadline.at_s + DRAIN_S, self._clock)
        lease = self._tree.lease(ModelId(fetch.model), pages, self.name, until)
        if lease is None:
            raise StaleEntry(f"{len(pages)} pages of model {fetch.model} are no longer here")
        return lease


CallSoon = Callable[[Callable[[], None]], None]
"""Has something done in the worker's thread; called from any."""


@dataclass(eq=False)
class DiskPromotion:
    """Looks where a fetch's pages are. Used by the worker's thread only; never blocks."""

    _tree: CacheTree
    _disk: DiskTier | None
    _counts: Counts
    _call_soon_threadsafe: CallSoon

    def promote(
        self,
        session: Session,
        request: Fetch | Store,
        page: bytes,
        deadline: Deadline,
        go_on: Callable[[], None],
    ) -> None:
        """Call `go_on` when `page` is in memory, or will not be; never after a cancel.

        At once where it is there, or on no disk. Fetches are counted by where their pages were.
        """
        model, last = ModelId(request.model), PageHash(page)
        is_page = len(page) == PAGE_HASH_BYTES
        is_here = is_page and self._tree.has(model, last)
        disk = None if is_here or not is_page else self._disk
        is_on_disk = disk is not None and disk.has(model, last)
        if isinstance(request, Fetch):
            (self._counts.hits if is_here else self._counts.misses)["memory"] += 1
            if self._disk is not None and not is_here:
                (self._counts.hits if is_on_disk else self._counts.misses)["disk"] += 1

        def resume() -> None:
            if request in session.promotions:
                session.promotions.discard(request)
                go_on()

        if disk is None or not is_on_disk:
            go_on()
            return
        session.promotions.add(request)
        if not disk.promote(model, last, deadline, lambda: self._call_soon_threadsafe(resume)):
            resume()
