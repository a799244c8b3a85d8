"""A data connection: payloads out of memory and into it, without a copy in between."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple, Protocol

import xxhash

from cachetree.checksum import checksum
from cachetree.errors import FetchError, ProtocolError
from cachetree.transport import frames, sealing
from cachetree.transport.address import Address
from cachetree.transport.frames import Frame
from cachetree.transport.sealing import Ticket, Unsealed, seals_of

MAX_MESSAGE_BYTES: Final = 64 << 10
"""Largest message that comes among the frames."""

_BATCH_BYTES: Final = 1 << 20
"""So much goes to the kernel together; small frames apart wake the receiver for each."""
_MAX_BUFFERS: Final = 64
_MAX_READS: Final = 64
"""In one turn."""
_WAKE_BYTES: Final = 1 << 20
"""Within a frame the receiver is woken for no less: a wakeup costs both sides."""
_KEEPALIVE_PROBES: Final = 3


class Arrival(NamedTuple):
    """A frame that came whole."""

    frame: Frame
    message: memoryview
    """Where `frame.id` is `MESSAGE`; else empty, and the payload is in its place."""
    is_sound: bool
    """Whether its checksum is right."""


class Sink(Protocol):
    """Where payloads go."""

    def room(self, frame: Frame) -> memoryview | None:
        """`frame.size` writable bytes, or None for nowhere. Raises ProtocolError for a frame that
        ends the connection."""

    def wants(self, frame: Frame) -> bool:
        """Whether what `room` gave may still be written."""


class Channel:
    """One TCP connection between the two sides of a session. Used by one thread; never blocks.

    Once `error` is set nothing goes in or out any more. Payloads that are put must stay as they
    are until `written_bytes` has come to what `queued_bytes` was then.
    """

    def __init__(self, connection: socket.socket, seals: Unsealed, max_frame_bytes: int) -> None:
        """Owns `connection`, which does not block."""
        self._socket = connection
        self._seals = seals
        self._max_frame_bytes = max_frame_bytes
        self.error: FetchError | None = None
        self.queued_bytes = 0
        self.written_bytes = 0
        self.received_bytes = 0
        self._unsent: deque[memoryview] = deque()
        self._frame: Frame | None = None
        """The one that comes now; None where a header is next."""
        self._into: memoryview | None = None
        self._at = 0
        """How many of its bytes are in `_into`."""
        self._digest = xxhash.xxh3_64()
        self._header = memoryview(bytearray(frames.HEADER_BYTES + seals.header_tag_bytes))
        self._scrap = memoryview(bytearray(0))
        """For what goes nowhere; as large as a piece once it is needed."""
        self._sealed = memoryview(bytearray(0))
        self._unit = self._piece = self._header
        """What is received next as a whole, and where it is to be read then."""
        self._unit_at = 0
        self._wake_bytes = 1

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_room(self) -> bool:
        """Whether more may be put."""
        return self.error is None and self.queued_bytes - self.written_bytes < _BATCH_BYTES

    def put(self, frame: Frame, payload: memoryview) -> None:
        """Send it at the next `flush`; sealed copies are made now."""
        self._queue(self._seals.seal(frames.pack(frame)))
        for piece in self._seals.seal_payload(payload):
            self._queue(piece)

    def put_message(self, message: bytes) -> None:
        payload = memoryview(message)
        self.put(
            Frame(
                id=frames.MESSAGE, step=0, offset=0, size=len(message), checksum=checksum(message)
            ),
            payload,
        )

    def flush(self) -> None:
        """Give the kernel what it takes."""
        while self._unsent:
            buffers = list(islice(self._unsent, _MAX_BUFFERS))
            try:
                num_bytes = self._socket.sendmsg(buffers)
            except BlockingIOError:
                return
            except OSError as exc:
                self._fail(exc)
                return
            self.written_bytes += num_bytes
            while num_bytes:
                first = self._unsent.popleft()
                if num_bytes < first.nbytes:
                    self._unsent.appendleft(first[num_bytes:])
                    return
                num_bytes -= first.nbytes

    def receive(self, sink: Sink) -> Iterator[Arrival]:
        """Take what has come, some MiB at most; raises ProtocolError, and then it has to close."""
        if self._into is not None and self._frame is not None and not sink.wants(self._frame):
            self._divert()
        for _ in range(_MAX_READS):
            if not self._read():
                return
            if self._unit_at < self._unit.nbytes:
                continue
            if self._frame is None:
                self._begin(sink)
            else:
                self._seals.open_piece(self._unit, self._piece)
                self._digest.update(self._piece)
                self._at += self._piece.nbytes
            if self._frame is not None and self._at == self._frame.size:
                frame, into, self._frame, self._into = self._frame, self._into, None, None
                self._unit = self._piece = self._header
                self._unit_at = 0
                if into is not None:
                    message = into if frame.id == frames.MESSAGE else into[:0]
                    yield Arrival(frame, message, self._digest.intdigest() == frame.checksum)
            else:
                self._await_piece()

    def close(self) -> None:
        self._socket.close()
        self.error = self.error or FetchError("the data connection is closed here")
        self._drop()

    def _queue(self, part: bytes | memoryview) -> None:
        if self.error is None and part:
            self._unsent.append(memoryview(part))
            self.queued_bytes += len(part)

    def _begin(self, sink: Sink) -> None:
        frame = frames.unpack(self._seals.open(self._header))
        most = MAX_MESSAGE_BYTES if frame.id == frames.MESSAGE else self._max_frame_bytes
        if not 0 < frame.size <= most:
            raise ProtocolError(f"a frame announces {frame.size} bytes of payload; {most} may come")
        if frame.id == frames.MESSAGE:
            self._into = memoryview(bytearray(frame.size))
        else:
            self._into = sink.room(frame)
        self._frame, self._at = frame, 0
        self._digest.reset()

    def _await_piece(self) -> None:
        assert self._frame is not None
        size = min(sealing.PIECE_BYTES, self._frame.size - self._at)
        tag_bytes = self._seals.piece_tag_bytes
        if self._into is not None:
            self._piece = self._into[self._at : self._at + size]
        else:
            self._piece = self._scrap_of(size)
        self._unit, self._unit_at = self._piece, 0
        if tag_bytes:
            if not self._sealed:
                self._sealed = memoryview(bytearray(sealing.PIECE_BYTES + tag_bytes))
            self._unit = self._sealed[: size + tag_bytes]

    def _divert(self) -> None:
        """The rest of the frame under way goes nowhere."""
        is_in_place = self._unit is self._piece
        self._into = None
        self._piece = self._scrap_of(self._piece.nbytes)
        if is_in_place:
            self._unit = self._piece

    def _scrap_of(self, size: int) -> memoryview:
        if not self._scrap:
            self._scrap = memoryview(bytearray(sealing.PIECE_BYTES))
        return self._scrap[:size]

    def _read(self) -> bool:
        """Whether something came; where nothing did, sleep until it is worth waking."""
        if self.error is not None:
            return False
        try:
            num_bytes = self._socket.recv_into(self._unit[self._unit_at :])
        except BlockingIOError:
            rest = 1 if self._frame is None else self._frame.size - self._at - self._unit_at
            self._wake_at(max(1, min(rest, _WAKE_BYTES)))
            return False
        except OSError as exc:
            self._fail(exc)
            return False
        if not num_bytes:
            self._fail(ConnectionResetError(errno.ECONNRESET, "closed by the other side"))
        self._unit_at += num_bytes
        self.received_bytes += num_bytes
        return bool(num_bytes)

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._wake_bytes:
            self._wake_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _fail(self, error: OSError) -> None:
        self.error = FetchError(f"the data connection ended: {error.strerror}")
        self._drop()

    def _drop(self) -> None:
        """Let go of all memory of others."""
        self._unsent.clear()
        self.written_bytes = self.queued_bytes
        self._into = None
        self._unit = self._piece = self._header


def connect(host: str, ticket: Ticket, max_frame_bytes: int) -> Channel:
    """Open the data connection of a session; it may still fail, as `error` says.

    Blocks only to look up a name. Raises FetchError.
    """
    to = Address(host, ticket.port)
    family = socket.AF_INET6 if to.is_ipv6 else socket.AF_INET
    try:
        ((*_, where), *_) = socket.getaddrinfo(host, ticket.port, family, socket.SOCK_STREAM)
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise FetchError(f"{to.url} cannot be reached: {exc.strerror}") from exc
    connection.setblocking(False)
    channel = Channel(connection, seals_of(ticket, is_worker=False), max_frame_bytes)
    channel._queue(ticket.token)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    code = connection.connect_ex(where)
    if code not in (0, errno.EINPROGRESS):
        channel._fail(OSError(code, errno.errorcode.get(code, "?")))
    return channel


def bound_silence(connection: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other end does not acknowledge any more."""
    probe_s = max(1, round(silence_s / _KEEPALIVE_PROBES / 2))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_USER_TIMEOUT, round(silence_s * 1000)),
        (socket.TCP_KEEPIDLE, max(1, round(silence_s / 2))),
        (socket.TCP_KEEPINTVL, probe_s),
        (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
