"""The peer's side of a session: a question over ZMQ, then one TCP connection for all else."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Clock
from cachetree.errors import CacheTreeError, FetchError, ProtocolError
from cachetree.memory import ArenaFile, ArenaReader
from cachetree.transport import channel, wire
from cachetree.transport.address import Address
from cachetree.transport.channel import Channel
from cachetree.transport.frames import MAX_MESSAGE_BYTES, Ticket
from cachetree.transport.handshake import FAILURES, Credentials
from cachetree.transport.receiver import NOT_ASKED
from cachetree.transport.wakeup import Wakeup

ONCE_MS: Final = -1
"""In place of the pause before another attempt."""


class Question:
    """One message to the address where a worker listens, and its answer.

    Used by one thread; never blocks. It goes with its context too.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to: Address,
        credentials: Credentials,
        message: wire.ToWorker,
        who: str,
        retry_ms: int = ONCE_MS,
    ) -> None:
        """`who` is asked, for errors. With a `retry_ms` it waits for a worker to come up."""
        self.to: Final = to
        self.credentials: Final = credentials
        self.who: Final = who
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, retry_ms)
        self._socket.set(zmq.IPV6, int(to.is_ipv6))
        credentials.secure(self._socket, MAX_MESSAGE_BYTES)
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED if retry_ms == ONCE_MS else 0
        self._monitor = self._socket.get_monitor_socket(FAILURES | ends)
        self._socket.connect(to.url)
        with suppress(zmq.Again):  # A handshake that has failed already; the monitor says why.
            self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def register(self, poller: zmq.Poller) -> None:
        """Have the poller wake up when there is an answer, or a failure."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def answer(self) -> wire.ToPeer | None:
        """None where there is none yet; raises ProtocolError."""
        if not self._socket.poll(0):
            return None
        header = self._socket.recv(copy=False)
        if header.more:
            raise ProtocolError("a message has more than one frame")
        return wire.decode_to_peer(header.buffer)

    def failure(self) -> CacheTreeError | None:
        """Why there will be no answer; look for that first. The first event says the most."""
        if not self._monitor.poll(0):
            return None
        event = recv_monitor_message(self._monitor)
        return self.credentials.failure(event["event"], event["value"], self.who)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


class Connection:
    """A connection attempt and what comes of it. Used by one thread; blocks only in `wait`.

    It does not reconnect: one that is down stays down, so that nothing of a worker's former life
    can be taken for the next one's.
    """

    def __init__(self, greeting: Question, wakeup: Wakeup, clock: Clock) -> None:
        """Owns `greeting`, which asks for a session."""
        self._greeting = greeting
        self._who = greeting.who
        self._wakeup = wakeup
        self._clock = clock
        self._heard_at_s = self._pinged_at_s = clock()
        self._received_bytes = 0
        self.channel: Channel | None = None
        """From `open` on."""
        self._bulk_url = ""
        """Where it leads, for people."""
        self.last_id = NOT_ASKED
        """Of the newest fetch or store."""
        self.owed: Final[dict[int, int]] = {}
        """By fetch that ended early, the most bytes that may still come in its frames."""
        self.arena: ArenaReader | None = None
        """The worker's memory, where it is to be read."""
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        greeting.register(self._poller)

    def wait(self, timeout_ms: int) -> None:
        """Until something arrives or ends, the wakeup is woken, or the time is over."""
        self._poller.poll(timeout_ms)
        self._wakeup.drain()

    def hello(self) -> wire.Hello | None:
        """The worker's, once it is there; raises what came instead."""
        answer = self._greeting.answer()
        match answer:
            case wire.Hello():
                return answer
            case wire.Bye():
                raise FetchError(f"{self._who} ended the session: {answer.reason}")
            case None:
                if (failure := self._greeting.failure()) is not None:
                    raise failure
                return None
        raise ProtocolError(f"{self._who} did not say hello first")

    def open(self, ticket: Ticket | None) -> None:
        """Open the session's channel; raises FetchError."""
        if ticket is None:
            raise ProtocolError(f"{self._who} gave no ticket for a data connection")
        host = self._greeting.to.host
        self._bulk_url = f"bulk_port {ticket.port} of {host}"
        seals = self._greeting.credentials.seals(ticket.key)
        self.channel = channel.connect(host, ticket, seals, self._wakeup.wake)
        self._greeting.close()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._poller.register(self.channel.fileno(), zmq.POLLIN)
        self._heard_at_s = self._clock()

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def send(self, message: wire.ToWorker) -> None:
        """Raises ProtocolError for one that is too large; no other error is seen before
        `require_open`."""
        if self.channel is not None:
            self.channel.put_message(wire.encode(message))

    def beat(self, every_s: float, patience_s: float) -> None:
        """Ping now and then; raises FetchError where the worker was silent for longer."""
        now_s = self._clock()
        received_bytes = self.channel.received_bytes if self.channel is not None else 0
        if received_bytes != self._received_bytes:
            self._received_bytes, self._heard_at_s = received_bytes, now_s
        if now_s - self._heard_at_s > patience_s:
            where = f" at {self._bulk_url}" if self.channel is not None else ""
            raise FetchError(f"{self._who} was silent for {patience_s} s{where}")
        if now_s - self._pinged_at_s >= every_s:
            self._pinged_at_s = now_s
            self.send(wire.Ping())

    def require_open(self) -> None:
        """Raises FetchError where the channel has ended. Read what has arrived first."""
        if self.channel is not None and self.channel.error is not None:
            raise FetchError(
                f"{self._who} closed the connection to its {self._bulk_url}, or it cannot be "
                f"reached there: {self.channel.error}"
            )

    def share(self, arena: ArenaFile) -> None:
        """Read from the worker's memory; it comes in frames where that cannot be."""
        with suppress(OSError):
            self.arena = ArenaReader(arena)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        if self.channel is not None:
            self.channel.close()
        else:
            self._greeting.close()
