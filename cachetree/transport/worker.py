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

from cachetree.clock import Clock, Deadline
from cachetree.disk import DiskTier
from cachetree.errors import (
    ConfigError,
    DeadlineExceeded,
    FamilyMismatch,
    FetchError,
    ProtocolError,
)
from cachetree.ids import PAGE_HASH_BYTES, Location
from cachetree.transport import frames, keys, verbs, wire
from cachetree.transport.address import parse_listen
from cachetree.transport.admin import AdminService
from cachetree.transport.advertise import Advertiser
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.channel import Channel
from cachetree.transport.config import WorkerConfig
from cachetree.transport.directory import Lease, Rounds, announced, check_announced
from cachetree.transport.handshake import gate_of
from cachetree.transport.receiver import StoreReceiver
from cachetree.transport.sender import BURST, SendScheduler, Stream
from cachetree.transport.server import Received, Router
from cachetree.transport.session import DiskPromotion, Session
from cachetree.transport.tracing import NoteServed, Served, untraced
from cachetree.transport.wakeup import CLOSE_S, Wakeup
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
        self._note_served: Final = note_served
        self._tree = tree
        self._sources = sources
        self._config = config
        self._disk = disk
        self._clock = clock
        self.epoch: Final = secrets.randbits(62) + 1
        """Random id of this worker's life."""
        self._sessions: list[Session] = []
        self._counts = verbs.Counts()
        self._admin = AdminService(tree, disk, self.status, clock)
        self._promotion = DiskPromotion(tree, disk, self._counts, self.call_soon_threadsafe)
        self._callbacks: deque[Callable[[], object]] = deque()
        """What other threads want done in the worker's."""
        self._turned_at_s = clock()
        self._closing = threading.Event()
        self._log_limiter = LogLimiter(clock)
        listen = parse_listen(
            config.listen, field="listen", insecure=config.insecure, key_file=config.key_file
        )
        gate = gate_of(config)
        if config.announce:
            check_announced(config.announce, listen)
        self._wakeup = Wakeup()
        try:
            self._router = Router(listen, self._wakeup, gate, config, clock)
        except ConfigError:
            self._wakeup.close()
            raise
        self._scheduler = SendScheduler(self._counts, config.max_bytes_per_s, clock)
        self.address: Final[Location] = self._router.address
        """The address bound, with the real port."""
        self._thread = threading.Thread(
            target=self._run, name=f"cachetree-worker {self.address}", daemon=True
        )
        self._thread.start()
        self._announced = self._announce(config) if config.announce else None

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
        self._wakeup.wake()
        self._thread.join(CLOSE_S)

    def _announce(self, config: WorkerConfig) -> Rounds:
        key = keys.read_key_pair(config.key_file).public if config.key_file else ""
        lease = Lease(public_key=key, addresses=(self.address,))
        return announced(config.announce, self._tree.family, self.epoch, lease)

    def status(self) -> verbs.Status:
        """The worker in numbers; from any thread, not an atomic picture."""
        return verbs.Status(
            version=wire.PROTOCOL_VERSION,
            epoch=self.epoch,
            model=self._config.model,
            num_peers=len(self._sessions),
            num_streams=len(self._scheduler),
            reads_from=self._sources(),
            num_bytes=self._tree.num_bytes,
            host_bytes=self._tree.host_bytes,
            num_pages=self._tree.num_pages,
            pages_by_model=self._tree.pages_by_model(),
            family=self._tree.family,
            disk=self._disk.status() if self._disk else None,
            **self._counts.now(),
        )

    @property
    def turn_age_s(self) -> float:
        """Since the worker's thread last turned; from any thread."""
        return self._clock() - self._turned_at_s

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
                    self._scheduler.retire()
                    self._closing.wait(_IDLE_S)
        finally:
            for session in tuple(self._sessions):
                self._end_session(session, "the worker is closing")
            self._scheduler.close()
            self._router.close()
            self._wakeup.close()

    def _turn(self) -> None:
        self._router.wait(round(1000 * min(_IDLE_S, self._scheduler.timeout_s())))
        self._turned_at_s = self._clock()
        self._wakeup.drain()
        for name, channel in self._router.arrivals():
            self._begin_session(name, channel)
        for refusal in self._router.refusals:
            self._counts.num_failed_handshakes += 1
            self._warn(f"not let in: {refusal.why}", refusal.who)
        while self._callbacks:
            self._callbacks.popleft()()
        for received in self._router.receive():
            self._handle(received)
        for session in tuple(self._sessions):
            if self._router.is_readable(session.channel):
                self._take(session)
            session.advertise(BURST)
        self._scheduler.send()
        self._expire()

    def _handle(self, received: Received) -> None:
        """Answer what needs no session."""
        identity, message, is_admin, host = received
        match message:
            case ProtocolError():
                self._counts.num_protocol_errors += 1
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

    def _serve(self, session: Session, message: wire.ToWorker) -> None:
        match message:
            case wire.Learned():
                session.advertiser.learned()
            case wire.Fetch():
                self._accept(session, message)
            case wire.Copied():
                if (stream := session.streams.get(message.id)) is not None:
                    stream.copied()
            case wire.Store():
                self._store(session, message)
            case wire.Cancel():
                if session.cancel(message.id):
                    self._counts.fetches_by_outcome["cancelled"] += 1
                session.tell(wire.Ended(id=message.id))
            case wire.Ping():
                session.tell(wire.Pong())
            case wire.Bye():
                self._end_session(session, "goodbye")
            case _:
                raise ProtocolError(f"a {type(message).__name__} has no place in a session")

    def _greet(self, identity: bytes, hello: wire.Hello, host: str) -> None:
        if len(self._sessions) >= self._config.max_peers:
            self._router.send(identity, wire.Bye(reason=self._full))
            return
        arena = ticket = None
        try:
            wire.require_family(hello, self._tree.family, who=f"the peer at {host}")
        except FamilyMismatch as exc:
            # Our hello tells the other side what differs; it refuses with its own words.
            self._counts.num_refused_peers += 1
            self._warn(f"refused: {exc}")
        else:
            ticket = self._router.issue_ticket(f"peer {identity.hex()} at {host}")
            arena = self._tree.memory.file if self._config.shared_memory else None
        disk_bytes = self._disk.budget_bytes if self._disk else 0
        answer = wire.hello(
            self._tree.family,
            self._config.model,
            self.epoch,
            arena,
            ticket,
            budget_bytes=self._tree.host_bytes + disk_bytes,
        )
        self._router.send(identity, answer)

    @property
    def _full(self) -> str:
        return f"the worker already serves {self._config.max_peers} peers"

    def _begin_session(self, name: str, channel: Channel) -> None:
        advertiser = Advertiser(self._tree, self._config.max_pending_changes, self._wakeup.wake)
        stores = StoreReceiver(self._tree, self._config, self._counts, channel, self._clock)
        session = Session(name, channel, self._tree, advertiser, stores, self._clock)
        self._sessions.append(session)
        if len(self._sessions) > self._config.max_peers:
            self._end_session(session, self._full)

    def _accept(self, session: Session, fetch: wire.Fetch) -> None:
        """Open a fetch, after its pages have been read from disk where that is needed."""
        try:
            session.admit(fetch)
        except ProtocolError as exc:
            self._fail(session, fetch.id, exc)
            return
        deadline = wire.deadline_of(fetch, self._clock)
        page = fetch.pages[-PAGE_HASH_BYTES:]
        go_on = partial(self._open, session, fetch, deadline, self._clock())
        self._promotion.promote(session, fetch, page, deadline, go_on)

    def _store(self, session: Session, store: wire.Store) -> None:
        """Begin a store, after the page before it has been read from disk likewise."""
        go_on = partial(session.stores.begin, store)
        if self._config.accepts:
            deadline = wire.deadline_of(store, self._clock)
            self._promotion.promote(session, store, store.parent, deadline, go_on)
        else:
            go_on()

    def _open(
        self, session: Session, fetch: wire.Fetch, deadline: Deadline, begun_s: float
    ) -> None:
        try:
            if len(self._scheduler) >= self._config.max_streams:
                raise FetchError(f"the worker already serves {len(self._scheduler)} fetches")
            stream = session.open(fetch, self._config, deadline)
        except FetchError as exc:
            self._fail(session, fetch.id, exc)
            self._note_served(Served(fetch, self._clock() - begun_s, 0, wire.reason(exc)))
        else:
            on_drained = partial(self._drained, session, fetch, stream, begun_s)
            self._scheduler.add(session.channel, stream, on_drained)

    def _drained(self, session: Session, fetch: wire.Fetch, stream: Stream, begun_s: float) -> None:
        session.streams.pop(stream.id, None)
        error = "it ended before all was sent" if stream.is_cut else ""
        seconds = self._clock() - begun_s
        self._note_served(Served(fetch, seconds, stream.sent_bytes, error))

    def _fail(self, session: Session, id: int, error: FetchError) -> None:
        """Also ends the stream of that id: of one that was asked for twice, neither goes on."""
        if (stream := session.streams.get(id)) is not None:
            stream.end()
        if isinstance(error, ProtocolError):
            self._counts.num_protocol_errors += 1
        message = wire.fetch_failed(id, error)
        self._counts.fetches_by_outcome[message.error] += 1
        session.tell(message)

    def _take(self, session: Session) -> None:
        session.heard_at_s = self._clock()
        try:
            for arrival in session.channel.receive(session.stores):
                if arrival.frame.id == frames.MESSAGE:
                    self._serve(session, wire.decode_to_worker(arrival.message))
                else:
                    session.stores.mark_received(arrival)
        except ProtocolError as exc:
            self._counts.num_protocol_errors += 1
            self._warn(f"{session.name} was cut off: {exc}", "cut off")
            self._end_session(session, wire.reason(exc))

    def _expire(self) -> None:
        now_s = self._clock()
        for session in tuple(self._sessions):
            for id in session.late():
                self._fail(session, id, DeadlineExceeded("the worker stopped at the deadline"))
            session.stores.expire()
            if session.channel.error is not None:
                self._end_session(session, str(session.channel.error))
            elif now_s - session.heard_at_s > self._config.silence_s:
                self._end_session(session, f"silent for {self._config.silence_s} s")
        self._scheduler.retire()

    def _warn(self, line: str, about: str = "") -> None:
        """Once a minute, of each that it is about."""
        if self._log_limiter.may(about or line):
            log.warning("worker %s: %s", self.address, line)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """From any thread: have it done in this one."""
        self._callbacks.append(callback)
        self._wakeup.wake()

    def _end_session(self, session: Session, reason: str) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            log.info("worker %s: %s left: %s", self.address, session.name, reason)
            lost = sum(not stream.is_over for stream in session.streams.values())
            self._counts.fetches_by_outcome["lost"] += lost
            session.close()
            session.tell(wire.Bye(reason=reason))
            self._router.drop(session.channel)
