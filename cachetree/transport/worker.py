"""Serve this process's cache to peers: one thread answers greetings and operators over ZMQ, and
runs the sessions of all peers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import msgspec
import zmq

from cachetree.clock import Clock
from cachetree.disk import DiskTier
from cachetree.errors import FamilyMismatch, ProtocolError
from cachetree.ids import Location, ModelId
from cachetree.transport import verbs, wire
from cachetree.transport.address import Address, cannot_bind
from cachetree.transport.admin import AdminService
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.channel import Channel, silence_limits
from cachetree.transport.config import WorkerConfig
from cachetree.transport.crowd import raise_descriptor_limit
from cachetree.transport.data_port import DataPort
from cachetree.transport.frames import MAX_MESSAGE_BYTES
from cachetree.transport.handshake import Refusal, check_worker
from cachetree.transport.sender import SendScheduler
from cachetree.transport.session import Service, Session
from cachetree.transport.tracing import NoteServed, untraced
from cachetree.transport.wakeup import CLOSE_S, Wakeup
from cachetree.tree import CacheTree

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25
_SWEEP_S: Final = 1.0
"""Seconds between two sweeps of the tree, which evict entries past their time to live."""
_MAX_RECEIVED: Final = 64
"""Largest number of ZMQ messages that one pass of the worker's loop answers."""


class Worker:
    """Serve the local entries of `tree` and the entries on `disk` to peers, and advertise them.

    The caller keeps ownership of the tree. Raises ConfigError if the address cannot be bound, or a
    key file cannot be read.
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
        """`sources` returns the peers that this server reads from. Any thread may call it."""
        self.epoch: Final = secrets.randbits(62) + 1
        """Random number of this start of the worker. A new number shows peers that it was
        restarted."""
        self._tree = tree
        counts = verbs.Status(
            version=wire.PROTOCOL_VERSION, epoch=self.epoch, model=config.model, family=tree.family
        )
        self._service = Service(
            tree=tree,
            disk=disk,
            config=config,
            counts=counts,
            scheduler=SendScheduler(counts, config.max_bytes_per_s, clock),
            note_served=note_served,
            clock=clock,
        )
        self._sources = sources
        self._admin = AdminService(tree, disk, self.status, clock)
        self._sessions: list[Session] = []
        self._callbacks: deque[Callable[[], object]] = deque()
        """Functions that other threads ask the worker's thread to call."""
        self._turned_at_s = self._swept_at_s = clock()
        self._closing = threading.Event()
        self._log_limiter = LogLimiter(clock)
        self._stranger_limiter = LogLimiter(clock)
        """Limit for log lines about refused connections. Clients can invent names there, which must
        not use up the limit of other log lines."""
        listen, self._gate = check_worker(config)
        raise_descriptor_limit()
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        with ExitStack() as undo:
            undo.callback(self._wakeup.close)
            undo.callback(self._context.destroy, linger=0)
            self._socket = self._bound(listen, config.silence_s)
            self._data_port = DataPort(
                Address(listen.host, config.bulk_port),
                self._gate.seals,
                self._poller,
                self._wakeup.wake,
                config,
                clock,
            )
            undo.callback(self._data_port.close)
            self.address: Final = Location(self._socket.get_string(zmq.LAST_ENDPOINT))
            """The bound address, with the real port."""
            for source in (self._wakeup.fileno(), self._socket):
                self._poller.register(source, zmq.POLLIN)
            self._thread = threading.Thread(
                target=self._run, name=f"cachetree-worker {self.address}", daemon=True
            )
            self._thread.start()
            undo.pop_all()  # The thread closes all of these at its end.

    def knowing(self) -> Callable[[], bool]:
        """Return a function that returns True once all peers know the tree's present entries. Peers
        that have left do not count. Thread-safe."""
        each = [session.advertiser.knowing() for session in tuple(self._sessions)]
        return lambda: all(knows() for knows in each)

    def close(self) -> None:
        """Stop serving. Running fetches fail on the other side at once. Idempotent."""
        self._closing.set()
        self._wakeup.wake()
        self._thread.join(CLOSE_S)

    def run(self, model: ModelId) -> None:
        """Set the id of the model that this server runs, for future handshakes. Thread-safe."""
        self._service.counts.model = model

    def status(self) -> verbs.Status:
        """Return the worker's state in numbers, not all of the same moment. Thread-safe."""
        service = self._service
        fields = msgspec.structs.asdict(service.counts).items()
        return msgspec.structs.replace(
            service.counts,
            num_peers=len(self._sessions),
            num_streams=len(service.scheduler),
            reads_from=self._sources(),
            num_bytes=self._tree.num_bytes,
            host_bytes=self._tree.host_bytes,
            held_bytes=self._tree.held_bytes,
            num_pinned_bytes=self._tree.num_pinned_bytes,
            num_pages=self._tree.num_pages,
            pages_by_model=self._tree.pages_by_model(),
            disk=service.disk.status() if service.disk else None,
            **{name: dict(counted) for name, counted in fields if isinstance(counted, Counter)},
        )

    @property
    def turn_age_s(self) -> float:
        """Seconds since the worker's loop began its last pass. Thread-safe."""
        return self._service.clock() - self._turned_at_s

    def _bound(self, listen: Address, silence_s: float) -> zmq.Socket[bytes]:
        """Open the socket for greetings and questions. The connection of a peer that vanishes from
        the network ends after `silence_s`. Raises ConfigError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, int(listen.is_ipv6))
        socket.set(zmq.TCP_KEEPALIVE, 1)
        keepalive = zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT
        limits = silence_limits(silence_s)
        for option, value in zip((zmq.TCP_MAXRT, *keepalive), limits, strict=True):
            socket.set(option, value)
        self._gate.guard(self._context, socket, self._poller, MAX_MESSAGE_BYTES)
        try:
            socket.bind(listen.url)
        except zmq.ZMQError as exc:
            raise cannot_bind("listen", listen, exc.strerror) from exc
        return socket

    # Everything below runs in the worker's thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._turn()
                except Exception:
                    log.exception("worker %s: internal error", self.address)
                    for session in tuple(self._sessions):
                        self._end_session(session, "the worker failed; connect again")
                    self._service.scheduler.retire()
                    self._closing.wait(_IDLE_S)
        except Exception:
            log.exception("worker %s: its thread has ended", self.address)
        finally:
            with ExitStack() as ends:  # The last one runs first. All run, even if one raises.
                ends.callback(self._wakeup.close)
                ends.callback(self._context.destroy, linger=0)
                ends.callback(self._data_port.close)
                ends.callback(self._service.scheduler.close)
                for session in self._sessions:
                    ends.callback(self._end_session, session, "the worker is closing")

    def _turn(self) -> None:
        timeout_s = min(_IDLE_S, self._service.scheduler.timeout_s())
        if self._admin.has_work:
            timeout_s = 0.0
        ready = {source for source, _ in self._poller.poll(round(1000 * timeout_s))}
        self._wakeup.drain()
        self._turned_at_s = self._service.clock()
        for refusal in self._gate.refusals(ready):
            self._note_refusal(refusal)
        for arrival in self._data_port.arrivals(ready):
            if isinstance(arrival, Refusal):
                self._note_refusal(arrival)
            else:
                self._begin_session(*arrival)
                ready.add(arrival[1].fileno())
        while self._callbacks:
            self._callbacks.popleft()()
        if self._socket in ready:
            self._receive()
        self._admin.go_on()
        for session in tuple(self._sessions):
            self._serve(session, is_ready=session.channel.fileno() in ready)
        self._service.scheduler.send()
        if self._turned_at_s - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = self._turned_at_s
            self._tree.sweep()
        for session in tuple(self._sessions):
            if reason := session.expire():
                self._end_session(session, reason)
        self._service.scheduler.retire()

    def _note_refusal(self, refusal: Refusal) -> None:
        self._service.counts.num_failed_handshakes += 1
        self._warn(f"not let in: {refusal.why}", refusal.who, self._stranger_limiter)

    def _receive(self) -> None:
        """Answer ZMQ messages that have arrived: greetings, and operators' questions and orders."""
        for _ in range(_MAX_RECEIVED):
            try:
                identity, header, *more = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._gate.note_message(header)
            host, send = str(header.get("Peer-Address")), partial(self._send, identity.bytes)
            try:
                if more:
                    raise ProtocolError("a message has more than one frame")
                match message := wire.decode_to_worker(header.buffer):
                    case wire.Hello():
                        who = f"peer {identity.bytes.hex()} at {host}"
                        send(self._greeting(message, who, host))
                    case _ if isinstance(message, verbs.ToWorker):
                        answer = partial(self._send_soon, identity.bytes)
                        self._admin.serve(message, answer, is_admin=self._gate.is_admin(header))
                    case _:
                        send(wire.Bye(reason="there is no session here; say hello"))
            except Exception as exc:  # noqa: BLE001  # It is counted and logged.
                why = self._cut_off(exc, f"a peer at {host}", f"cut off {host}")
                send(wire.Bye(reason=why))

    def _send(self, identity: bytes, message: wire.ToPeer) -> None:
        """Send a message over ZMQ. It is lost if the peer is gone, or does not read."""
        try:
            header = wire.encode(message)
        except ProtocolError as exc:  # The answer names too many models for one message.
            header = wire.encode(verbs.Denied(reason=wire.reason(exc)))
        self._socket.send_multipart([identity, header], zmq.NOBLOCK)

    def _send_soon(self, identity: bytes, message: wire.ToPeer) -> None:
        """Send a message from any thread."""
        self._callbacks.append(partial(self._send, identity, message))
        self._wakeup.wake()

    def _greeting(self, hello: wire.Hello, who: str, host: str) -> wire.Hello | wire.Bye:
        service, arena, ticket = self._service, None, None
        if len(self._sessions) >= service.config.max_peers:
            return wire.Bye(reason=self._full)
        try:
            wire.require_family(hello, self._tree.family, who=f"the peer at {host}")
        except FamilyMismatch as exc:
            # The peer compares the families, too: our hello, without a ticket, shows it ours.
            service.counts.num_refused_peers += 1
            self._warn(f"refused: {exc}", str(exc), self._stranger_limiter)
        else:
            ticket = self._data_port.issue_ticket(who)
            arena = self._tree.memory.file if service.config.shared_memory else None
        most_bytes = self._tree.host_bytes + (service.disk.budget_bytes if service.disk else 0)
        return wire.hello(
            self._tree.family, service.counts.model, self.epoch, arena, ticket, most_bytes
        )

    @property
    def _full(self) -> str:
        return f"the worker already serves {self._service.config.max_peers} peers"

    def _begin_session(self, name: str, channel: Channel) -> None:
        session = Session(name, channel, self._service, self._wakeup.wake)
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._sessions.append(session)
        if len(self._sessions) > self._service.config.max_peers:
            self._end_session(session, self._full)

    def _serve(self, session: Session, *, is_ready: bool) -> None:
        try:
            session.go_on()
            if is_ready:
                session.take()
            session.advertise()
        except Exception as exc:  # noqa: BLE001  # It is counted and logged.
            self._end_session(session, self._cut_off(exc, session.name, "cut off"))

    def _cut_off(self, error: Exception, who: str, about: str) -> str:
        """Count and log an error with a peer's message. Return the reason to send to the peer."""
        self._service.counts.num_protocol_errors += 1
        if isinstance(error, ProtocolError):
            self._warn(f"{who} was cut off: {error}", about, self._log_limiter)
            return wire.reason(error)
        if self._log_limiter.may(f"failed {about}"):
            log.error("worker %s: internal error with %s", self.address, who, exc_info=error)
        return "the worker failed; connect again"

    def _warn(self, line: str, about: str, limiter: LogLimiter) -> None:
        """Log a line, once a minute for each subject in `about`."""
        if limiter.may(about):
            log.warning("worker %s: %s", self.address, line)

    def _end_session(self, session: Session, reason: str) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            log.info("worker %s: %s left: %s", self.address, session.name, reason)
            session.close(reason)
            self._poller.unregister(session.channel.fileno())
            session.channel.close()
