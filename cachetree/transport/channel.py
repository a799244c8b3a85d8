"""A data connection. It carries messages, and payloads from memory to memory without a copy.

Everything arrives whole and in order, or the connection ends.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from cachetree.errors import FetchError, ProtocolError
from cachetree.memory import checksum
from cachetree.transport import frames
from cachetree.transport.address import Address
from cachetree.transport.frames import Frame, Ticket, Unsealed
from cachetree.transport.receiver import FrameReceiver
from cachetree.transport.send_queue import SendQueue

_MAX_READS: Final = 64
"""Largest number of reads from the socket in one call of `receive`."""
_WAKE_BYTES: Final = 1 << 20
"""Bytes of a frame that have to arrive before the reading thread wakes: each wakeup takes time."""
_UNSENT_BYTES: Final = 256 << 10
"""Largest number of unsent bytes in the kernel. More would leave the processor's caches before they
are sent."""
_KEEPALIVE_PROBES: Final = 3


ReceiverOf = Callable[[Frame], FrameReceiver | None]
"""Function that returns the receiver of a payload frame. None: discard the payload. Raises
ProtocolError for a frame that ends the connection."""


class Channel:
    """One TCP connection between the two sides of a session. Used by one thread; never blocks.

    Once it has an `error`, nothing is sent or received any more.
    """

    def __init__(
        self, connection: socket.socket, seals: Unsealed, wake: Callable[[], None]
    ) -> None:
        """Take ownership of `connection`. The other arguments are as in `SendQueue`."""
        self._socket = connection
        self._seals = seals
        self.send_queue: Final = SendQueue(connection, seals, wake)
        self.received_bytes = 0
        self.served_bytes = 0
        """Bytes counted for this channel, as in `Stream.served_bytes`. The channel with the lowest
        number sends next."""
        self._error: FetchError | None = None
        self._frame: Frame | None = None
        """Frame that is being received. None if a header is next."""
        self._into: memoryview | None = None
        """Memory for the frame's payload. None if the payload is discarded."""
        self._receiver: FrameReceiver | None = None
        """Receiver of the payload. None if the payload is discarded, or is a message."""
        self._at = 0
        """Number of bytes of the payload received so far."""
        self._digest = xxhash.xxh3_64()
        self._header = memoryview(bytearray(frames.HEADER_BYTES + seals.header_tag_bytes))
        self._sealed = np.empty(frames.PIECE_BYTES + seals.piece_tag_bytes, np.uint8).data
        """Memory for one encrypted piece of a payload. Without keys it is never touched."""
        self._unit = self._piece = self._header
        """`_unit` is the buffer for the next bytes from the socket. Once it is full, its content is
        decrypted into `_piece`. Without keys both are the same memory."""
        self._unit_at = 0
        self._wake_bytes = 1

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def error(self) -> FetchError | None:
        if self._error is None and self.send_queue.error is not None:
            self._fail(self.send_queue.error)
        return self._error

    @property
    def has_room(self) -> bool:
        return self.send_queue.has_room and self.error is None

    def put(self, frame: Frame, payload: Sequence[memoryview]) -> None:
        """Queue a frame. Its payload must not change until the queue has written it."""
        self.send_queue.put(frame, payload)

    def put_message(self, message: bytes) -> None:
        """Queue a message behind all queued frames. If the other side does not read, the connection
        ends."""
        frame = Frame(id=frames.MESSAGE, offset=0, size=len(message), checksum=checksum(message))
        if not self.send_queue.put_message(frame, message):
            self._fail(OSError(errno.ENOBUFS, "the other side does not read what it is sent"))

    def receive(self, receiver_of: ReceiverOf) -> Iterator[memoryview]:
        """Receive at most some MiB: write payloads into their receivers' memory, and yield
        messages. After a ProtocolError the caller has to close the channel."""
        frame, receiver = self._frame, self._receiver
        if frame is not None and receiver is not None and not receiver.is_pending(frame):
            self._divert()
        for _ in range(_MAX_READS):
            if not self._read():
                return
            if self._unit_at < self._unit.nbytes:
                continue
            if self._frame is None:
                self._begin(receiver_of)
            else:
                self._seals.open_piece(self._unit, self._piece)
                self._digest.update(self._piece)
                self._at += self._piece.nbytes
            if self._frame is not None and self._at == self._frame.size:
                frame, into, receiver = self._frame, self._into, self._receiver
                self._frame = None
                self._drop()
                self._unit_at = 0
                if receiver is not None:
                    is_sound = self._digest.intdigest() == frame.checksum
                    receiver.mark_received(frame, is_sound=is_sound)
                elif into is not None:
                    yield into
            else:
                self._await_piece()
        self._sleep()

    def close(self) -> None:
        self.send_queue.close()
        self._socket.close()
        self._error = self._error or FetchError("the data connection is closed here")
        self._drop()

    def _begin(self, receiver_of: ReceiverOf) -> None:
        frame = frames.unpack(self._seals.open(self._header))
        is_message = frame.id == frames.MESSAGE
        most = frames.MAX_MESSAGE_BYTES if is_message else frames.MAX_FRAME_BYTES
        if not 0 < frame.size <= most:
            raise ProtocolError(f"a frame announces {frame.size} bytes of payload; {most} may come")
        if is_message:
            self._into = memoryview(bytearray(frame.size))
        elif (receiver := receiver_of(frame)) and (into := receiver.buffer_for(frame)) is not None:
            self._into, self._receiver = into, receiver
        self._frame, self._at = frame, 0
        self._digest.reset()

    def _await_piece(self) -> None:
        assert self._frame is not None
        size = min(frames.PIECE_BYTES, self._frame.size - self._at)
        tag_bytes = self._seals.piece_tag_bytes
        if self._into is not None:
            self._piece = self._into[self._at : self._at + size]
        else:
            self._piece = memoryview(bytearray(size))
        self._unit = self._sealed[: size + tag_bytes] if tag_bytes else self._piece
        self._unit_at = 0

    def _divert(self) -> None:
        """Discard the rest of the current frame."""
        self._into = self._receiver = None
        scrap = memoryview(bytearray(self._piece.nbytes))
        if self._unit is self._piece:
            self._unit = scrap
        self._piece = scrap

    def _read(self) -> bool:
        """Read bytes into `_unit`. Return False if none had arrived, or the channel has ended."""
        if self.error is not None:
            return False
        try:
            num_bytes = self._socket.recv_into(self._unit[self._unit_at :], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._sleep()
            return False
        except OSError as exc:
            self._fail(exc)
            return False
        if not num_bytes:
            self._fail(ConnectionResetError(errno.ECONNRESET, "closed by the other side"))
        self._unit_at += num_bytes
        self.received_bytes += num_bytes
        return bool(num_bytes)

    def _sleep(self) -> None:
        """Let the kernel report the socket as ready only when enough bytes have arrived."""
        rest = 1 if self._frame is None else self._frame.size - self._at - self._unit_at
        num_bytes = max(1, min(rest, _WAKE_BYTES))
        if num_bytes != self._wake_bytes:
            self._wake_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _fail(self, error: OSError) -> None:
        self._error = FetchError(f"the data connection ended: {error.strerror}")
        self._drop()

    def _drop(self) -> None:
        """Write no more into the memory of receivers."""
        self._into = self._receiver = None
        self._unit = self._piece = self._header


def connect(host: str, ticket: Ticket, seals: Unsealed, wake: Callable[[], None]) -> Channel:
    """Open the data connection of a session, to IP address `host`. Returns at once. If the
    connection fails, the channel's `error` says why."""
    to = Address(host, ticket.port)
    connection = socket.socket(socket.AF_INET6 if to.is_ipv6 else socket.AF_INET)
    connection.setblocking(False)
    tune(connection)
    channel = Channel(connection, seals, wake)
    code = connection.connect_ex((to.host, to.port))
    if code in (0, errno.EINPROGRESS):
        channel.send_queue.put_raw(ticket.token)
    else:
        channel._fail(OSError(code, errno.errorcode.get(code, "?")))
    return channel


def tune(connection: socket.socket) -> None:
    """Set the options of a connection, before anything is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def bound_silence(connection: socket.socket, silence_s: float) -> None:
    """Let the kernel end a connection if the other end acknowledges nothing for `silence_s`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    for option, value in zip(options, silence_limits(silence_s), strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_limits(silence_s: float) -> tuple[int, int, int, int]:
    """Return the kernel's limits for a TCP connection that is silent for `silence_s`.

    The limits are: ms until the connection ends if sent data are not acknowledged, seconds without
    data until the first probe, seconds between probes, and the number of probes.
    """
    probe_s = max(1, round(silence_s / _KEEPALIVE_PROBES / 2))
    return round(silence_s * 1000), max(1, round(silence_s / 2)), probe_s, _KEEPALIVE_PROBES
