"""A peer's connections to a worker: one question over ZMQ (its hello), then a session over TCP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cachetree.clock import Clock, Deadline
from cachetree.errors import DeadlineExceeded, FetchError, ProtocolError
from cachetree.memory import ArenaReader
from cachetree.transport import channel, wire
from cachetree.transport.address import Address
from cachetree.transport.frames import MAX_MESSAGE_BYTES, Ticket
from cachetree.transport.handshake import FAILURES, Credentials
from cachetree.transport.receiver import NOT_ASKED
from cachetree.transport.verbs import Order
from cachetree.transport.wakeup import Wakeup

_MOST_S: Final = 3600.0
"""Longest single poll in seconds. A longer wait polls several times."""


def poll(poller: zmq.Poller, most_s: float) -> None:
    poller.poll(round(1000 * min(most_s, _MOST_S)))


def answer_of(
    to: Address,
    credentials: Credentials,
    question: wire.ToWorker,
    deadline: Deadline,
    *,
    until_up: bool,
    wait: Callable[[zmq.Poller, float], None] = poll,
) -> wire.ToPeer:
    """Send a question to the worker at `to`, and return its answer. Blocks only in calls of `wait`.

    If no worker listens yet, wait for it with `until_up`, else raise FetchError. Raises
    DeadlineExceeded, ProtocolError, AuthenticationError, and the errors of `wait`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    who = f"worker {to.url}"
    try:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        if not until_up:
            socket.set(zmq.RECONNECT_IVL, -1)
        socket.set(zmq.IPV6, int(to.is_ipv6))
        credentials.secure(socket, MAX_MESSAGE_BYTES)
        ends = 0 if until_up else zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        monitor = socket.get_monitor_socket(FAILURES | ends)
        socket.connect(to.url)
        with suppress(zmq.Again):  # The handshake has failed already; the monitor says why.
            socket.send(wire.encode(question), zmq.NOBLOCK)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while not socket.poll(0):
            if monitor.poll(0):  # The first event says most about the cause.
                raise credentials.failure(recv_monitor_message(monitor)["event"], who)
            if deadline.has_passed:
                busy = "; a busy worker may still do it" if isinstance(question, Order) else ""
                raise DeadlineExceeded(f"no worker answered at {to.url} in time{busy}")
            wait(poller, deadline.remaining_s())
        header = socket.recv(copy=False)
        if header.more:
            raise ProtocolError("a message has more than one frame")
        return wire.decode_to_peer(header.buffer)
    finally:
        context.destroy(linger=0)


class Connection:
    """One session of a peer, over one channel. Used by one thread; blocks only in `wait`.

    It never reconnects, so a message from before a worker's restart cannot arrive later.
    """

    def __init__(
        self, to: Address, credentials: Credentials, ticket: Ticket, wakeup: Wakeup, clock: Clock
    ) -> None:
        """`to` has the IP address of the worker that issued the ticket: a name could have
        several."""
        self._who: Final = f"worker {to.url}"
        self._bulk_url: Final = f"bulk_port {ticket.port} of {to.host}"
        self._wakeup = wakeup
        self._clock = clock
        self._heard_at_s = self._pinged_at_s = clock()
        self._received_bytes = 0
        seals = credentials.seals(ticket.key)
        self.channel: Final = channel.connect(to.host, ticket, seals, wakeup.wake)
        self.last_id = NOT_ASKED
        """Id of the newest fetch."""
        self.owed: Final[dict[int, int]] = {}
        """Largest number of bytes that may still arrive for fetches that ended early, by the
        fetch's id."""
        self.arena: ArenaReader | None = None
        """The worker's memory, if this peer copies from it."""
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._poller.register(self.channel.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Block until bytes arrive, the channel ends, another thread wakes this thread, or the time
        is over."""
        poll(self._poller, timeout_s)
        self._wakeup.drain()

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def send(self, message: wire.ToWorker) -> None:
        """Queue a message to the worker. Raises ProtocolError if the message is too large. If the
        connection has ended, only `beat` raises an error."""
        self.channel.put_message(wire.encode(message))

    def beat(self, every_s: float, patience_s: float) -> None:
        """Ping the worker every `every_s`. Raises FetchError if the worker was silent for longer
        than `patience_s`, or the channel has ended. Receive arrived bytes before the call."""
        if self.channel.error is not None:
            raise FetchError(
                f"{self._who} closed the connection to its {self._bulk_url}, or it cannot be "
                f"reached there: {self.channel.error}"
            )
        now_s = self._clock()
        if self.channel.received_bytes != self._received_bytes:
            self._received_bytes, self._heard_at_s = self.channel.received_bytes, now_s
        if now_s - self._heard_at_s > patience_s:
            raise FetchError(f"{self._who} was silent for {patience_s} s at {self._bulk_url}")
        if now_s - self._pinged_at_s >= every_s:
            self._pinged_at_s = now_s
            self.send(wire.Ping())

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        self.channel.close()
