"""The serving side: one thread that answers over ZMQ and serves sessions beside it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from cachetree.clock import Clock
from cachetree.disk import DiskTier
from cachetree.errors import FamilyMismatch, ProtocolError
from cachetree.ids import Location
from cachetree.transport import keys, verbs, wire
from cachetree.transport.admin import AdminService
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.directory import Found, Rounds, announced
from cachetree.transport.handshake import Refusal, check_worker
from cachetree.transport.sender import SendScheduler
from cachetree.transport.server import Received, Router
from cachetree.transport.session import Service, Session
from cachetree.transport.tracing import NoteServed, untraced
from cachetree.transport.wakeup import CLOSE_S
from cachetree.tree import CacheTree

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25


class Worker:
    """Serves the local entries of `tree` to peers, those on `disk` too, and tells them which.

    The tree stays its owner's. Raises ConfigError where the address cannot be bound or a key file
    not be read.
    """

    def __init__(
        self,
        tree: CacheTree,
        config: WorkerConfig,
        *,
        disk: DiskTier | None = None,
        sources: Callable[[], tuple[verbs.Source, ...]] = tuple,
        clock: Clock = time.monotonic,
        note_served: NoteServed = untraced,
    ) -> None:
        """`sources` tells what this server reads from, and is called from any thread."""
        self.epoch: Final = secrets.randbits(62) + 1
        """Random id of this worker's life."""
        self._tree = tree
        counts = verbs.Counts()
        self._service = Service(
            tree=tree,
            disk=disk,
            config=config,
            counts=counts,
            scheduler=SendScheduler(counts, config.max_bytes_per_s, clock),
            call_soon_threadsafe=self.call_soon_threadsafe,
            note_served=note_served,
            clock=clock,
        )
        self._sources = sources
        self._admin = AdminService(tree, disk, self.status, clock)
        self._sessions: list[Session] = []
        self._callbacks: deque[Callable[[], object]] = deque()
        """What other threads want done in the worker's."""
        self._turned_at_s = clock()
        self._closing = threading.Event()
        self._log_limiter = LogLimiter(clock)
        self._router = Router(*check_worker(config), config, clock)
        self.address: Final[Location] = self._router.address
        """The address bound, with the real port."""
        self._thread = threading.Thread(
            target=self._run, name=f"cachetree-worker {self.address}", daemon=True
        )
        self._thread.start()
        self._announced: Rounds | None = None
        if config.announce:
            key = keys.read_key_pair(config.key_file).public if config.key_file else ""
            own = Found(self.address, key)
            self._announced = announced(config.announce, tree.family, self.epoch, own)

    def knowing(self) -> Callable[[], bool]:
        """Asks whether all peers know by now what was in the tree at this call, but for those who
        have left. Any thread."""
        each = [session.advertiser.knowing() for session in tuple(self._sessions)]
        return lambda: all(knows() for knows in each)

    def close(self) -> None:
        """Stop serving; streams under way end on the other side at once. Idempotent."""
        if self._announced is not None:
            self._announced.close()
        self._closing.set()
        self._router.wake()
        self._thread.join(CLOSE_S)

    def status(self) -> verbs.Status:
        """The worker in numbers; from any thread, not an atomic picture."""
        it = self._service
        return verbs.Status(
            version=wire.PROTOCOL_VERSION,
            epoch=self.epoch,
            model=it.config.model,
            num_peers=len(self._sessions),
            num_streams=len(it.scheduler),
            reads_from=self._sources(),
            num_bytes=self._tree.num_bytes,
            host_bytes=self._tree.host_bytes,
            num_pages=self._tree.num_pages,
            pages_by_model=self._tree.pages_by_model(),
            family=self._tree.family,
            disk=it.disk.status() if it.disk else None,
            **it.counts.now(),
        )

    @property
    def turn_age_s(self) -> float:
        """Since the worker's thread last turned; from any thread."""
        return self._service.clock() - self._turned_at_s

    # Everything below runs in the worker's thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._turn()
                except Exception:
                    log.exception("worker %s: internal error", self.address)
                    for session in tuple(self._sessions):
                        self._end_session(session, "the worker failed; greet again")
                    self._service.scheduler.retire()
                    self._closing.wait(_IDLE_S)
        finally:
            for session in tuple(self._sessions):
                self._end_session(session, "the worker is closing")
            self._service.scheduler.close()
            self._router.close()

    def _turn(self) -> None:
        self._router.wait(round(1000 * min(_IDLE_S, self._service.scheduler.timeout_s())))
        self._turned_at_s = self._service.clock()
        for arrival in self._router.arrivals():
            if isinstance(arrival, Refusal):
                self._service.counts.num_failed_handshakes += 1
                self._warn(f"not let in: {arrival.why}", arrival.who)
            else:
                self._begin_session(*arrival)
        while self._callbacks:
            self._callbacks.popleft()()
        for received in self._router.receive():
            self._handle(received)
        for session in tuple(self._sessions):
            if self._router.is_readable(session.channel):
                self._take(session)
            session.advertise()
        self._service.scheduler.send()
        for session in tuple(self._sessions):
            if reason := session.expire():
                self._end_session(session, reason)
        self._service.scheduler.retire()

    def _handle(self, received: Received) -> None:
        """Answer what needs no session."""
        identity, message, is_admin, host = received
        match message:
            case ProtocolError():
                self._service.counts.num_protocol_errors += 1
                self._warn(f"a peer at {host} was cut off: {message}", f"cut off {host}")
                self._router.send(identity, wire.Bye(reason=wire.reason(message)))
            case wire.Hello():
                self._greet(identity, message, host)
            case _ if isinstance(message, verbs.ToWorker):
                send = partial(self._router.send, identity)
                self._admin.serve(
                    message,
                    lambda answer: self.call_soon_threadsafe(partial(send, answer)),
                    is_admin=is_admin,
                )
            case _:
                self._router.send(identity, wire.Bye(reason="there is no session here; say hello"))

    def _greet(self, identity: bytes, hello: wire.Hello, host: str) -> None:
        if len(self._sessions) >= self._service.config.max_peers:
            self._router.send(identity, wire.Bye(reason=self._full))
            return
        it, arena, ticket = self._service, None, None
        try:
            wire.require_family(hello, self._tree.family, who=f"the peer at {host}")
        except FamilyMismatch as exc:
            # Our hello tells the other side what differs; it refuses with its own words.
            it.counts.num_refused_peers += 1
            self._warn(f"refused: {exc}")
        else:
            ticket = self._router.issue_ticket(f"peer {identity.hex()} at {host}")
            arena = self._tree.memory.file if it.config.shared_memory else None
        most_bytes = self._tree.host_bytes + (it.disk.budget_bytes if it.disk else 0)
        answer = wire.hello(
            self._tree.family, it.config.model, self.epoch, arena, ticket, most_bytes
        )
        self._router.send(identity, answer)

    @property
    def _full(self) -> str:
        return f"the worker already serves {self._service.config.max_peers} peers"

    def _begin_session(self, name: str, channel: Channel) -> None:
        session = Session(name, channel, self._service, self._router.wake)
        self._sessions.append(session)
        if len(self._sessions) > self._service.config.max_peers:
            self._end_session(session, self._full)

    def _take(self, session: Session) -> None:
        try:
            session.take()
        except ProtocolError as exc:
            self._service.counts.num_protocol_errors += 1
            self._warn(f"{session.name} was cut off: {exc}", "cut off")
            self._end_session(session, wire.reason(exc))

    def _warn(self, line: str, about: str = "") -> None:
        """Once a minute, of each that it is about."""
        if self._log_limiter.may(about or line):
            log.warning("worker %s: %s", self.address, line)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """From any thread: have it done in this one."""
        self._callbacks.append(callback)
        self._router.wake()

    def _end_session(self, session: Session, reason: str) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            log.info("worker %s: %s left: %s", self.address, session.name, reason)
            session.close(reason)
            self._router.drop(session.channel)
