"""An operator's questions and orders to a worker: `ask` sends one, `AdminService` answers it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier
from cachetree.errors import (
    OrderDenied,
    PinRefused,
    ProtocolError,
)
from cachetree.ids import ModelId, PageHash
from cachetree.transport import verbs, wire
from cachetree.transport.address import parse_remote, resolved
from cachetree.transport.connection import answer_of
from cachetree.transport.handshake import Credentials
from cachetree.transport.wire import pages_of
from cachetree.tree import CacheTree

_Answer = TypeVar("_Answer", bound=verbs.ToPeer)


def ask(
    address: str,
    question: verbs.ToWorker,
    kind: type[_Answer],
    *,
    timeout_s: float,
    credentials: Credentials | None = None,
) -> _Answer:
    """Send a question or order to the worker at `address`, and return its answer of type `kind`.
    Waits at most `timeout_s`, even if the worker has not started yet.

    Raises ConfigError, FetchError if the name has no address, AuthenticationError,
    DeadlineExceeded, ProtocolError, or OrderDenied.
    """
    remote = resolved(parse_remote(address, field="address"))
    how, deadline = credentials or Credentials(), Deadline.after(timeout_s)
    answer = answer_of(remote, how, question, deadline, until_up=True)
    if isinstance(answer, verbs.Denied):
        raise OrderDenied(f"{address}: {wire.said(answer)}")
    if not isinstance(answer, kind):
        raise ProtocolError(f"{address} answered with a {type(answer).__name__}")
    return answer


Answer = Callable[[verbs.ToPeer], None]
"""Function that sends an answer. Called once, from any thread."""


_NODES: Final = 128
"""Tree nodes that an eviction visits in one pass of the worker's loop: some 10 ms of work."""


@dataclass(eq=False)
class AdminService:
    """Answer questions and orders, in the worker's thread. Never blocks.

    An eviction is answered later: after some calls of `go_on`, or by the disk's threads if there is
    a disk.
    """

    _tree: CacheTree
    _disk: DiskTier | None
    _status: Callable[[], verbs.Status]
    _clock: Clock
    _evictions: deque[Iterator[int]] = field(default_factory=deque, init=False)
    _told: verbs.Status | None = field(default=None, init=False)
    """State of the worker for all questions of one pass of its loop. Anyone may ask without limit,
    so it is computed once."""

    @property
    def has_work(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self._evictions)

    def go_on(self) -> None:
        """Continue the oldest eviction a little. The worker calls this in each pass of its loop."""
        self._told = None
        if self.has_work and len(tuple(islice(self._evictions[0], _NODES))) < _NODES:
            del self._evictions[0]

    def serve(self, asked: verbs.ToWorker, answer: Answer, *, is_admin: bool) -> None:
        try:
            if isinstance(asked, verbs.Order) and not is_admin:
                raise OrderDenied(
                    "this worker takes no orders from here: list your public key under "
                    "worker.admin there or, where it has no key, set admin: [] and let it listen "
                    "on a loopback address"
                )
            self._serve(asked, answer)
        except (ProtocolError, PinRefused, OrderDenied) as exc:
            answer(verbs.Denied(reason=wire.reason(exc)))

    def _serve(self, asked: verbs.ToWorker, answer: Answer) -> None:
        match asked:
            case verbs.StatusRequest():
                if self._told is None:
                    self._told = self._status()
                answer(self._told)
            case verbs.Find():
                pages = pages_of(asked.pages)
                matches = self._tree.match(pages[: self._tree.num_there(pages)], is_use=False)
                answer(verbs.Found(holdings=tuple(matches)))
            case verbs.Evict():
                self._evict(_model(asked.model), pages_of(asked.pages), answer)
            case verbs.Pin():
                ttl_s = asked.ttl_s
                if ttl_s is not None and not ttl_s > 0:
                    raise ProtocolError(f"a pin is to last {ttl_s} s; it must be above 0")
                deadline = None if ttl_s is None else Deadline.after(ttl_s, self._clock)
                pages = pages_of(asked.pages)
                pinned = self._tree.pin(_model(asked.model), pages, deadline)
                answer(
                    verbs.Pinned(pages_by_model={str(each): num for each, num in pinned.items()})
                )
            case verbs.Unpin():
                pages = pages_of(asked.pages)
                answer(verbs.Unpinned(was_pinned=self._tree.unpin(_model(asked.model), pages)))

    def _evict(self, model: ModelId | None, pages: Sequence[PageHash], answer: Answer) -> None:
        def tell(num_bytes: int, num_disk_bytes: int) -> None:
            answer(verbs.Evicted(num_bytes=num_bytes, num_disk_bytes=num_disk_bytes))

        def steps() -> Iterator[int]:
            num_bytes = 0
            for freed in self._tree.evicting(model, pages):
                num_bytes += freed
                yield freed
            tell(num_bytes, 0)

        if self._disk is None:
            self._evictions.append(steps())
        else:
            self._disk.evict(model, pages, tell)


def _model(name: str) -> ModelId | None:
    return ModelId(name) if name else None
