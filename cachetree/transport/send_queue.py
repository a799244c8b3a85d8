"""What goes out over a data connection, given to the kernel by a thread that may wait."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from cachetree.tier import lower_priority
from cachetree.transport import frames
from cachetree.transport.frames import Frame, Unsealed
from cachetree.transport.wakeup import CLOSE_S

log = logging.getLogger(__name__)

_LEAST_BATCH_BYTES: Final = 1 << 20
MOST_BATCH_BYTES: Final = 32 << 20
_FIRST_BATCH_BYTES: Final = 4 << 20
_BATCH_S: Final = 0.02
"""A batch takes about so long: what is put meanwhile waits for it."""
_MAX_BUFFERS: Final = 1024
"""The kernel takes no more in one call."""
_MANY_MESSAGES: Final = 64
"""Whoever can wait puts no more while so many wait."""
_MAX_MESSAGES: Final = 1024
"""With so many nobody reads on the other side."""
_MAX_SEALED: Final = (1 << 20) // frames.PIECE_BYTES
"""Sealed pieces that wait for the kernel."""


class _Part(NamedTuple):
    frame: Frame | None
    """None where the payload goes as it is, without a header and in clear."""
    payload: Sequence[memoryview]
    """Its parts, of bytes."""
    size: int
    """In clear."""


class SendQueue:
    """Frames in the order they were put. Used by one thread, which also closes the connection.

    The kernel gets a batch of them in one call that blocks: after each call of the system the
    interpreter's lock is taken anew, which whoever computes in this process then waits for.
    Payloads must stay as they are until `has_written` what was put so far.
    """

    def __init__(
        self,
        connection: socket.socket,
        seals: Unsealed,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from another thread: when all is written, when there is room for who
        found none, and at the end."""
        self.queued_bytes = 0
        """Put so far: headers and payloads, in clear."""
        self.error: OSError | None = None
        self._connection = connection
        self._seals = seals
        self._wake = wake
        self._written_bytes = 0
        self._num_messages = self._num_written_messages = 0
        """Put so far, and of these those that the kernel has."""
        self._is_awaited = False
        """Whether somebody waits for room."""
        self._is_over = False
        """Nothing goes out any more."""
        self._dropped: dict[int, int] = {}
        """Requests whose frames go nowhere, and what was queued when that was said."""
        self._batch_bytes = _FIRST_BATCH_BYTES
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """While a batch is on its way the next one is put together. If not, `wake` will tell."""
        self._is_awaited = True  # Before looking, so that no wake is missed.
        waiting_bytes = self.queued_bytes - self._written_bytes
        num_messages = self._num_messages - self._num_written_messages
        is_full = waiting_bytes >= 2 * self._batch_bytes or num_messages >= _MANY_MESSAGES
        self._is_awaited = is_full
        return not self._is_awaited and not self._is_over

    def has_written(self, num_bytes: int) -> bool:
        """Whether the kernel has what was put until `queued_bytes` was that, or nobody sends it."""
        return self._is_over or self._written_bytes >= num_bytes

    def put(self, frame: Frame, payload: Sequence[memoryview]) -> None:
        self._put(_Part(frame, payload, frames.HEADER_BYTES + frame.size))

    def put_message(self, frame: Frame, payload: bytes) -> bool:
        """As `put`, but at once where nothing waits: an answer then needs no other thread.

        False where too many wait.
        """
        part = _Part(frame, [memoryview(payload)], frames.HEADER_BYTES + frame.size)
        if self._written_bytes == self.queued_bytes and not self._is_over:
            sealed = memoryview(b"".join(self._sealed(part)))  # The thread waits for a part.
            with suppress(OSError):  # It meets whoever writes next; or the kernel is full.
                sealed = sealed[self._connection.send(sealed, socket.MSG_DONTWAIT) :]
            if sealed:
                self.put_raw(bytes(sealed))
            return True
        self._num_messages += 1
        self._put(part)
        return self._num_messages - self._num_written_messages <= _MAX_MESSAGES

    def put_raw(self, payload: bytes) -> None:
        """As it is."""
        self._put(_Part(None, [memoryview(payload)], len(payload)))

    def drop(self, id: int) -> None:
        """Send no more frames of a request for which nothing is put any more."""
        written_bytes = self._written_bytes
        waiting = {it: until for it, until in self._dropped.items() if until > written_bytes}
        self._dropped = waiting | {id: self.queued_bytes}

    def close(self) -> None:
        """Drop what waits. No memory of others is read any more. Idempotent."""
        self._is_over = True
        if self._thread is not None:
            with suppress(OSError):  # Nobody is connected; else a call under way ends.
                self._connection.shutdown(socket.SHUT_RDWR)
            self._parts.put(None)
            self._thread.join(CLOSE_S)

    def _put(self, part: _Part) -> None:
        if self._is_over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cachetree-send", daemon=True)
            self._thread.start()
        self.queued_bytes += part.size
        self._parts.put(part)

    # Everything below runs in a thread of its own.

    def _run(self) -> None:
        try:
            lower_priority()
            self._connect()
            while not self._is_over and (part := self._parts.get()) is not None:
                batch = [part, *self._more(part.size)]
                begun_s = time.perf_counter()
                self._send(batch)
                num_bytes = sum(part.size for part in batch)
                self._adapt(num_bytes, time.perf_counter() - begun_s)
                sent = [part.frame for part in batch if part.frame is not None]
                self._num_written_messages += sum(it.id == frames.MESSAGE for it in sent)
                self._written_bytes += num_bytes
                del part, batch, sent
                if self._is_awaited or self._parts.empty():
                    self._is_awaited = False
                    self._wake()
        except OSError as exc:
            self.error = exc.with_traceback(None)  # Which knows the last batch.
        except Exception:
            log.exception("a data connection ends here")
            self.error = OSError(errno.EIO, "an internal error of this side")
        finally:
            self._is_over = True
            with suppress(Empty):
                while True:
                    self._parts.get_nowait()
            self._wake()

    def _connect(self) -> None:
        """Wait until the connection is there, and block from then on."""
        poller = select.poll()
        poller.register(self._connection, select.POLLOUT)
        poller.poll()
        self._connection.setblocking(True)

    def _more(self, num_bytes: int) -> Iterator[_Part]:
        """What waits, as far as a batch of which there are `num_bytes` takes it."""
        with suppress(Empty):
            while num_bytes < self._batch_bytes:
                part = self._parts.get_nowait()
                if part is None:  # Closed.
                    return
                yield part
                num_bytes += part.size

    def _send(self, batch: list[_Part]) -> None:
        """In one call; what is sealed, in several: it is a copy until it is sent."""
        buffers: deque[memoryview] = deque()
        for part in batch:
            for buffer in self._sealed(part):
                buffers.append(buffer)
                if self._seals.piece_tag_bytes and len(buffers) == _MAX_SEALED:
                    self._give(buffers)
        self._give(buffers)

    def _sealed(self, part: _Part) -> Iterator[memoryview]:
        if part.frame is None:
            yield from part.payload
        elif part.frame.id not in self._dropped:
            yield memoryview(self._seals.seal(frames.pack(part.frame)))
            for piece in self._seals.seal_payload(part.payload):
                yield memoryview(piece)

    def _give(self, buffers: deque[memoryview]) -> None:
        """All of them to the kernel; none is left."""
        while buffers:
            num_bytes = self._connection.sendmsg(list(islice(buffers, _MAX_BUFFERS)))
            while buffers and num_bytes >= len(buffers[0]):
                num_bytes -= len(buffers.popleft())
            if num_bytes:
                buffers[0] = buffers[0][num_bytes:]

    def _adapt(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= self._batch_bytes and seconds < _BATCH_S / 2:
            self._batch_bytes = min(2 * self._batch_bytes, MOST_BATCH_BYTES)
        elif seconds > 2 * _BATCH_S:
            self._batch_bytes = max(self._batch_bytes // 2, _LEAST_BATCH_BYTES)
