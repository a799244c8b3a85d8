"""A TCP proxy between a peer and a worker. It causes one fault at an exact frame of a connection.

    peer ──► proxy ──► worker      Towards.WORKER
    peer ◄── proxy ◄── worker      Towards.PEER

ZMTP (RFC 37 of ZeroMQ): each side sends a greeting of 64 bytes, then frames: a byte
of flags (1 more, 2 long, 4 command), the size in one byte or, if long, in eight, and the body.
The parts of a greeting count as frames here, as do the commands of the handshake.

The data connection has its own proxy, at the port that the worker's hello names. The peer sends a
token; then headers and payloads of `cachetree.transport.frames` follow. If they are sealed, the
proxy cannot see where one ends: bytes that arrive together count as a frame.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from cachetree import Location, ProtocolError
from cachetree.transport import frames, wire
from cachetree.transport.address import Address, parse_remote
from cachetree.transport.frames import TOKEN_BYTES, Unsealed

DELAY_S = 0.15
BYTES_PER_S = 1e6
_PIECE_BYTES = 16 << 10
_GREETING = (10, 1, 53)
"""Parts of a greeting: signature, version, rest. A side sends each part after it has read the other
side's part before."""
_MORE = 1
_LONG = 2
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_MAX_FRAME_BYTES = 1 << 30
_POLL_S = 0.02
"""Seconds after which a waiting thread notices that its connection has ended."""


class Fault(Enum):
    DELAY = "the frame, and all that follow it, come later"
    DROP = "the frame never comes"
    DUPLICATE = "the frame comes twice"
    REORDER = "the frame comes after the next one"
    DROP_MESSAGE = "the frame and the rest of its message never come"
    DUPLICATE_MESSAGE = "the frame and the rest of its message come twice"
    REORDER_MESSAGE = "the frame and the rest of its message come after the next message"
    TRUNCATE = "the connection is closed within the frame"
    FLIP_FRAMING = "one bit of the flags or of the size is wrong"
    FLIP_BODY = "one bit of the body is wrong"
    STALL = "from here on nothing comes in this direction, and the connection stays open"
    THROTTLE = "from here on this direction takes 1 MB/s"
    RESET = "the connection is reset before the frame"


_OF_MESSAGES = (Fault.DROP_MESSAGE, Fault.DUPLICATE_MESSAGE, Fault.REORDER_MESSAGE)


class Towards(Enum):
    WORKER = "the worker"
    PEER = "the peer"


class Via(Enum):
    ZMQ = "ZMQ"
    DATA = "the data connection"
    SEALED = "the sealed data connection"


_hosts = itertools.count(2)
"""Numbers of this process's proxies. They make host addresses, because a proxy has the same port as
its worker."""


@dataclass(frozen=True)
class Strike:
    """One fault at frame number `index` of one direction. Frames are counted from `arm` on."""

    fault: Fault
    towards: Towards
    index: int
    via: Via = Via.ZMQ

    def __str__(self) -> str:
        where = f"{self.index} of {self.via.value} towards {self.towards.value}"
        return f"{self.fault.name} at frame {where}"


@dataclass(frozen=True)
class Deed:
    """An action before frame number `index` of one direction is forwarded.

    A thread of the proxy calls `act`. It may cut the proxy's connections: then neither this frame
    nor a later one is forwarded.
    """

    act: Callable[[], None]
    towards: Towards
    index: int
    via: Via = Via.ZMQ


@dataclass(frozen=True)
class _Frame:
    head: bytes
    body: bytes
    has_more: bool = False
    """Whether the next frame belongs to the same message."""

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    def flipped(self, fault: Fault, chance: random.Random) -> bytes:
        """Return the frame with one changed bit: in its head or its body, as the fault says, or in
        the other part if that one is empty."""
        raw = bytearray(self.raw)
        is_in_head = self.head and (fault is Fault.FLIP_FRAMING or not self.body)
        start, stop = (0, len(self.head)) if is_in_head else (len(self.head), len(raw))
        raw[chance.randrange(start, stop)] ^= 1 << chance.randrange(8)
        return bytes(raw)


class _Over(Exception):
    """Raised if the connection has ended, or has to end."""


class _Link:
    """The two sockets of one forwarded connection, closed when both directions have ended."""

    def __init__(self, peer: socket.socket, worker: socket.socket, via: Via) -> None:
        self.via = via
        self.over = threading.Event()
        self._sockets = {Towards.PEER: peer, Towards.WORKER: worker}
        self._open = set(Towards)
        self._lock = threading.Lock()
        for side in self._sockets.values():
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            side.settimeout(_POLL_S)

    def frames(self, towards: Towards) -> Iterator[_Frame]:
        """Read the frames of one direction. Raises _Over."""
        (source,) = (side for to, side in self._sockets.items() if to is not towards)
        if self.via is Via.ZMQ:
            for num_bytes in _GREETING:
                yield _Frame(b"", self._read(source, num_bytes))
        elif towards is Towards.WORKER:
            yield _Frame(b"", self._read(source, TOKEN_BYTES))
        while True:
            match self.via:
                case Via.ZMQ:
                    flags = self._read(source, 1)
                    size = self._read(source, 8 if flags[0] & _LONG else 1)
                    if int.from_bytes(size, "big") > _MAX_FRAME_BYTES:
                        raise _Over  # A greeting was harmed, and they speak an older ZMTP.
                    body = self._read(source, int.from_bytes(size, "big"))
                    yield _Frame(flags + size, body, bool(flags[0] & _MORE))
                case Via.DATA:
                    sealed = self._read(source, frames.HEADER_BYTES + Unsealed.header_tag_bytes)
                    yield _Frame(sealed, b"", has_more=True)
                    size = frames.unpack(sealed[: frames.HEADER_BYTES]).size
                    yield _Frame(b"", self._read(source, size))
                case Via.SEALED:
                    yield _Frame(b"", self._read(source, 1) + self._read_some(source))

    def send(self, towards: Towards, raw: bytes, bytes_per_s: float) -> None:
        """Send bytes in one direction. Raises _Over."""
        rest = memoryview(raw)
        while rest:
            with suppress(TimeoutError):
                num_bytes = self._sockets[towards].send(rest[:_PIECE_BYTES])
                rest = rest[num_bytes:]
                self.pause(num_bytes / bytes_per_s)
            self.pause(0)

    def pause(self, seconds: float | None) -> None:
        """Wait for so many seconds, or without an end if None. Raises _Over if the connection
        ends."""
        if self.over.wait(seconds):
            raise _Over

    def reset(self) -> None:
        """Let the connection end with a RST instead of a FIN."""
        for side in self._sockets.values():
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def leave(self, towards: Towards) -> None:
        """End this direction. The other direction then ends, too."""
        self.over.set()
        with self._lock:
            self._open.remove(towards)
            if not self._open:
                for side in self._sockets.values():
                    side.close()

    def _read_some(self, source: socket.socket) -> bytes:
        """Read the bytes that have arrived, at most the rest of 4 KiB."""
        with suppress(BlockingIOError, TimeoutError):
            return source.recv(4095, socket.MSG_DONTWAIT)
        return b""

    def _read(self, source: socket.socket, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            with suppress(TimeoutError):
                piece = source.recv(num_bytes - len(parts))
                if not piece:
                    raise _Over
                parts += piece
            self.pause(0)
        return bytes(parts)


class FaultProxy:
    """Forwards every connection to `address` to `target`. Once armed, it causes one fault.

    It has its own host address on this machine. So the port that a worker names for the data
    connection also leads to the proxy. A direction stays stalled or throttled until its connection
    ends; the next connection is sound. Leaving the context closes all connections and ends the
    threads.
    """

    def __init__(self, target: Location, *, seed: int, sealed_port: int | None = None) -> None:
        """`sealed_port` is the worker's port for data connections, if the proxy cannot read it from
        a sealed hello."""
        print(f"fault proxy before {target}: seed {seed}")
        self._target = parse_remote(target, field="target")
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._strike: Strike | Deed | None = None
        self._seen: Counter[tuple[Via, Towards]] = Counter()
        self._links: list[_Link] = []
        self._pumps: list[threading.Thread] = []
        self._is_closing = self._is_shut = False
        number = next(_hosts)
        self._host = f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.address = Location(f"tcp://{self._host}:{self._target.port}")
        self._threads: dict[int, threading.Thread] = {}
        """Listening threads, by port."""
        self._listen(self._target.port, Via.ZMQ)
        if sealed_port is not None:
            self._listen(sealed_port, Via.SEALED)

    def arm(self, strike: Strike | Deed | None) -> None:
        """Begin to count, and strike when it is due. None only counts."""
        with self._lock:
            self._strike = strike
            self._seen = Counter()

    @property
    def has_struck(self) -> bool:
        return self._strike is None

    def num_frames(self, towards: Towards, via: Via = Via.ZMQ) -> int:
        """Number of frames in one direction since the last `arm`."""
        return self._seen[via, towards]

    def cut(self) -> None:
        """Close every connection, with stalled and slow directions."""
        for link in tuple(self._links):
            link.over.set()

    def shut(self) -> None:
        """Behave like a worker that is away: close every connection, and each new one at once."""
        self._is_shut = True
        self.cut()

    def open(self) -> None:
        self._is_shut = False

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        for thread in self._threads.values():
            thread.join()
        self.cut()
        for pump in self._pumps:
            pump.join()

    # Everything below runs in the proxy's threads.

    def _listen(self, port: int, via: Via) -> None:
        with self._lock:
            if port not in self._threads:
                listener = socket.create_server((self._host, port))
                listener.settimeout(_POLL_S)
                name = f"fault proxy {self.address} {via.name}"
                arguments = (listener, port, via)
                self._threads[port] = threading.Thread(
                    target=self._accept, args=arguments, name=name
                )
                self._threads[port].start()

    def _accept(self, listener: socket.socket, port: int, via: Via) -> None:
        with listener:
            while not self._is_closing:
                with suppress(OSError):  # Nobody came, or there is no target now.
                    self._connect(listener.accept()[0], Address(self._target.host, port), via)

    def _connect(self, peer: socket.socket, to: Address, via: Via) -> None:
        if self._is_shut:
            peer.close()
            return
        try:
            worker = socket.create_connection((to.host, to.port))
        except OSError:
            peer.close()
            raise
        link = _Link(peer, worker, via)
        self._links = [each for each in self._links if not each.over.is_set()] + [link]
        self._pumps = [each for each in self._pumps if each.is_alive()]
        for towards in Towards:
            self._pumps.append(threading.Thread(target=self._pump, args=(link, towards)))
            self._pumps[-1].start()

    def _pump(self, link: _Link, towards: Towards) -> None:
        try:
            self._forward(link, towards)
        except ConnectionResetError:
            link.reset()
        except (_Over, OSError):
            pass
        finally:
            link.leave(towards)

    def _forward(self, link: _Link, towards: Towards) -> None:
        """Forward one direction, and return when the connection has to be closed. Raises
        ConnectionResetError for a RST."""
        bytes_per_s = float("inf")
        held, follows = b"", Fault.REORDER
        passing = link.frames(towards)
        for frame in passing:
            raw, rest = frame.raw, frame
            self._look_for_data_port(link, frame)
            due = self._due(link.via, towards)
            if isinstance(due, Deed):
                due.act()
                link.pause(0)
            fault = due.fault if isinstance(due, Strike) else None
            while fault in _OF_MESSAGES and rest.has_more:
                rest = next(passing)
                raw += rest.raw
                self._due(link.via, towards)
            match fault:
                case Fault.DELAY:
                    link.pause(DELAY_S)
                case Fault.DROP | Fault.DROP_MESSAGE:
                    continue
                case Fault.DUPLICATE | Fault.DUPLICATE_MESSAGE:
                    raw += raw
                case Fault.REORDER | Fault.REORDER_MESSAGE:
                    held, follows = raw, fault
                    continue
                case Fault.TRUNCATE:
                    link.send(towards, raw[: self._random.randrange(len(raw))], bytes_per_s)
                    return
                case Fault.FLIP_FRAMING | Fault.FLIP_BODY:
                    raw = frame.flipped(fault, self._random)
                case Fault.STALL:
                    link.pause(None)
                case Fault.THROTTLE:
                    bytes_per_s = BYTES_PER_S
                case Fault.RESET:
                    raise ConnectionResetError
            link.send(towards, raw, bytes_per_s)
            if follows is Fault.REORDER or not frame.has_more:
                link.send(towards, held, bytes_per_s)
                held = b""

    def _look_for_data_port(self, link: _Link, frame: _Frame) -> None:
        """Begin to listen at the worker's data port, too, once the worker's hello has named it."""
        if link.via is Via.ZMQ and b"ticket" in frame.body:
            with suppress(ProtocolError):
                hello = wire.decode_to_peer(memoryview(frame.body))
                if isinstance(hello, wire.Hello) and hello.ticket is not None:
                    self._listen(hello.ticket.port, Via.DATA)

    def _due(self, via: Via, towards: Towards) -> Strike | Deed | None:
        """Count a frame. Return the fault or deed that is due at it, if any."""
        with self._lock:
            index = self._seen[via, towards]
            self._seen[via, towards] += 1
            strike = self._strike
            if strike is None or (strike.via, strike.towards, strike.index) != (
                via,
                towards,
                index,
            ):
                return None
            self._strike = None
            return strike
