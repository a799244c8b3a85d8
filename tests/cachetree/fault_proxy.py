"""A TCP proxy between a peer and a worker that does harm at an exact frame of ZMTP 3.

    peer ──► proxy ──► worker      Towards.WORKER
    peer ◄── proxy ◄── worker      Towards.PEER

ZMTP (RFC 37 of ZeroMQ): each side sends a greeting of 64 bytes, then frames: a byte
of flags (1 more, 2 long, 4 command), the size in one byte or, if long, in eight, and the body.
The parts of a greeting count as frames here, as do the commands of the handshake.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from cachetree import Location
from cachetree.transport.address import parse_remote

DELAY_S = 0.15
BYTES_PER_S = 1e6
_PIECE_BYTES = 16 << 10
_GREETING = (10, 1, 53)
"""Signature, version, the rest: each is sent once the other side's part before it was read."""
_LONG = 2
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(Enum):
    DELAY = "the frame, and all that follow it, come later"
    DROP = "the frame never comes"
    DUPLICATE = "the frame comes twice"
    REORDER = "the frame comes after the next one"
    TRUNCATE = "the connection is closed within the frame"
    FLIP_FRAMING = "one bit of the flags or of the size is wrong"
    FLIP_BODY = "one bit of the body is wrong"
    STALL = "from here on nothing comes in this direction, and the connection stays open"
    THROTTLE = "from here on this direction takes 1 MB/s"
    RESET = "the connection is reset before the frame"


class Towards(Enum):
    WORKER = "the worker"
    PEER = "the peer"


@dataclass(frozen=True)
class Strike:
    """One fault at frame number `index` of one direction, counted from when it was armed."""

    fault: Fault
    towards: Towards
    index: int


@dataclass(frozen=True)
class _Frame:
    head: bytes
    body: bytes

    def flipped(self, fault: Fault, random: random.Random) -> bytes:
        """With one bit changed; in the body where there is no head, and the other way round."""
        raw = bytearray(self.head + self.body)
        is_in_head = self.head and (fault is Fault.FLIP_FRAMING or not self.body)
        start, stop = (0, len(self.head)) if is_in_head else (len(self.head), len(raw))
        raw[random.randrange(start, stop)] ^= 1 << random.randrange(8)
        return bytes(raw)


class FaultProxy:
    """Forwards every connection made to `address` to `target`, and strikes once when armed.

    A stalled or throttled direction stays so until its connection ends; the next connection is
    sound. Leaving the context closes all connections and ends the thread.
    """

    def __init__(self, target: Location, *, seed: int) -> None:
        print(f"fault proxy before {target}: seed {seed}")
        self._target = parse_remote(target, field="target")
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._strike: Strike | None = None
        self._seen: Counter[Towards] = Counter()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = Location(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        self._loop = asyncio.new_event_loop()
        serving = asyncio.start_server(self._connect, sock=listener)
        self._server = self._loop.run_until_complete(serving)
        self._thread = threading.Thread(target=self._run, name=f"fault proxy {self.address}")
        self._thread.start()

    def arm(self, strike: Strike | None) -> None:
        """Begin to count, and strike when it is due. None only counts."""
        with self._lock:
            self._strike = strike
            self._seen = Counter()

    @property
    def has_struck(self) -> bool:
        return self._strike is None

    def num_frames(self, towards: Towards) -> int:
        """Frames in one direction since the last `arm`."""
        return self._seen[towards]

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # Everything below runs in the proxy's thread.

    def _run(self) -> None:
        loop = self._loop
        loop.run_forever()
        self._server.close()
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(asyncio.sleep(0))  # The sockets are closed one turn later.
        loop.close()

    async def _connect(
        self, peer_reader: asyncio.StreamReader, peer_writer: asyncio.StreamWriter
    ) -> None:
        writers = [peer_writer]
        pumps: list[asyncio.Task[None]] = []
        try:
            worker_reader, worker_writer = await asyncio.open_connection(
                self._target.host, self._target.port
            )
            writers.append(worker_writer)
            pumps = [
                asyncio.create_task(self._pump(Towards.WORKER, peer_reader, worker_writer)),
                asyncio.create_task(self._pump(Towards.PEER, worker_reader, peer_writer)),
            ]
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        except ConnectionResetError:
            for writer in writers:
                _reset(writer)
        except asyncio.CancelledError:
            for writer in writers:
                writer.transport.abort()
        except OSError:
            pass
        finally:
            for pump in pumps:
                pump.cancel()
            for writer in writers:
                writer.close()

    async def _pump(
        self, towards: Towards, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Returns where the connection is to be closed; raises ConnectionResetError for a RST."""
        bytes_per_s = float("inf")
        held = b""
        async for frame in _frames(reader):
            raw = frame.head + frame.body
            match fault := self._fault_due(towards):
                case Fault.DELAY:
                    await asyncio.sleep(DELAY_S)
                case Fault.DROP:
                    continue
                case Fault.DUPLICATE:
                    raw += raw
                case Fault.REORDER:
                    held = raw
                    continue
                case Fault.TRUNCATE:
                    writer.write(raw[: self._random.randrange(len(raw))])
                    return
                case Fault.FLIP_FRAMING | Fault.FLIP_BODY:
                    raw = frame.flipped(fault, self._random)
                case Fault.STALL:
                    await asyncio.Event().wait()
                case Fault.THROTTLE:
                    bytes_per_s = BYTES_PER_S
                case Fault.RESET:
                    raise ConnectionResetError
            await _send(writer, raw + held, bytes_per_s)
            held = b""

    def _fault_due(self, towards: Towards) -> Fault | None:
        with self._lock:
            index = self._seen[towards]
            self._seen[towards] += 1
            strike = self._strike
            if strike is None or (strike.towards, strike.index) != (towards, index):
                return None
            self._strike = None
            return strike.fault


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[_Frame]:
    with suppress(asyncio.IncompleteReadError):
        for size in _GREETING:
            yield _Frame(b"", await reader.readexactly(size))
        while True:
            flags = await reader.readexactly(1)
            size = await reader.readexactly(8 if flags[0] & _LONG else 1)
            body = await reader.readexactly(int.from_bytes(size, "big"))
            yield _Frame(flags + size, body)


async def _send(writer: asyncio.StreamWriter, raw: bytes, bytes_per_s: float) -> None:
    for start in range(0, len(raw), _PIECE_BYTES):
        piece = raw[start : start + _PIECE_BYTES]
        writer.write(piece)
        await writer.drain()
        if bytes_per_s != float("inf"):
            await asyncio.sleep(len(piece) / bytes_per_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, with a RST instead of a FIN."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
        )
    writer.transport.abort()
