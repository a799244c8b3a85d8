"""Outgoing frames of a data connection, which a thread of its own writes to the socket."""

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
"""Seconds that sending one batch should take. Frames queued meanwhile wait for it."""
_MAX_BUFFERS: Final = 1024
"""Largest number of buffers that the kernel takes in one call."""
_MANY_MESSAGES: Final = 64
"""Number of waiting messages from which on `has_room` is false."""
_MAX_MESSAGES: Final = 1024
"""Largest number of waiting messages. If more wait, the other side does not read."""
_MAX_SEALED: Final = (1 << 20) // frames.PIECE_BYTES
"""Largest number of sealed pieces that wait for the kernel."""


class _Part(NamedTuple):
    frame: Frame | None
    """Header of the payload. None: the payload is sent without a header and in clear."""
    payload: Sequence[memoryview]
    """Buffers that together are the payload."""
    size: int
    """Number of bytes before sealing, with the header."""


class SendQueue:
    """Queue of frames for one connection. One thread queues and closes; another one sends.

    The sending thread gives the kernel a whole batch in one blocking call. After each call, the
    thread takes the interpreter's lock and so delays computing threads; batches keep calls few.
    Payloads must not change until `has_written` is true for everything queued so far.
    """

    def __init__(
        self,
        connection: socket.socket,
        seals: Unsealed,
        wake: Callable[[], None],
    ) -> None:
        """The sending thread calls `wake` when everything is written, when there is room again
        after `has_room` was false, and when the thread ends."""
        self.queued_bytes = 0
        """Bytes queued so far: headers and payloads, before sealing."""
        self.error: OSError | None = None
        self._connection = connection
        self._seals = seals
        self._wake = wake
        self._written_bytes = 0
        self._num_messages = self._num_written_messages = 0
        """Messages queued so far. The kernel has taken `_num_written_messages` of them."""
        self._is_awaited = False
        """Whether `has_room` was false and `wake` has to be called."""
        self._is_over = False
        """True once the queue sends nothing more."""
        self._dropped: dict[int, int] = {}
        """Value of `queued_bytes` when a request was dropped, by its id, for requests with frames
        that still have to be discarded."""
        self._batch_bytes = _FIRST_BATCH_BYTES
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Whether more frames may be queued now. If not, `wake` is called later."""
        self._is_awaited = True  # Set before the check, so that no wake is missed.
        waiting_bytes = self.queued_bytes - self._written_bytes
        num_messages = self._num_messages - self._num_written_messages
        is_full = waiting_bytes >= 2 * self._batch_bytes or num_messages >= _MANY_MESSAGES
        self._is_awaited = is_full
        return not self._is_awaited and not self._is_over

    def has_written(self, num_bytes: int) -> bool:
        """Return whether everything queued up to this value of `queued_bytes` is written to the
        kernel, or the queue sends nothing more."""
        return self._is_over or self._written_bytes >= num_bytes

    def put(self, frame: Frame, payload: Sequence[memoryview]) -> None:
        self._put(_Part(frame, payload, frames.HEADER_BYTES + frame.size))

    def put_message(self, frame: Frame, payload: bytes) -> bool:
        """Queue a message. If nothing waits, send it at once from this thread, which is faster.

        Return False if too many messages wait.
        """
        part = _Part(frame, [memoryview(payload)], frames.HEADER_BYTES + frame.size)
        if self._written_bytes == self.queued_bytes and not self._is_over:
            sealed = memoryview(b"".join(self._sealed(part)))  # The sending thread is idle.
            with suppress(OSError):  # The kernel is full, or the sending thread meets the error.
                sealed = sealed[self._connection.send(sealed, socket.MSG_DONTWAIT) :]
            if sealed:
                self.put_raw(bytes(sealed))
            return True
        self._num_messages += 1
        self._put(part)
        return self._num_messages - self._num_written_messages <= _MAX_MESSAGES

    def put_raw(self, payload: bytes) -> None:
        """Queue bytes to send in clear, without a header."""
        self._put(_Part(None, [memoryview(payload)], len(payload)))

    def drop(self, id: int) -> None:
        """Discard the queued frames of request `id`. The caller queues no more of them."""
        written_bytes = self._written_bytes
        waiting = {it: until for it, until in self._dropped.items() if until > written_bytes}
        self._dropped = waiting | {id: self.queued_bytes}

    def close(self) -> None:
        """Discard waiting frames, and end the sending thread. Afterwards no payload is read any
        more. Idempotent."""
        self._is_over = True
        if self._thread is not None:
            with suppress(OSError):  # A running call ends, or there is no connection yet.
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
            self.error = exc.with_traceback(None)  # They would keep the batch alive.
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
        """Wait until the connection is open, and let calls on the socket block."""
        poller = select.poll()
        poller.register(self._connection, select.POLLOUT)
        poller.poll()
        self._connection.setblocking(True)

    def _more(self, num_bytes: int) -> Iterator[_Part]:
        """Yield waiting frames for a batch that already has `num_bytes`, until it is full."""
        with suppress(Empty):
            while num_bytes < self._batch_bytes:
                part = self._parts.get_nowait()
                if part is None:  # Closed.
                    return
                yield part
                num_bytes += part.size

    def _send(self, batch: list[_Part]) -> None:
        """Send a batch: in one call without keys, else a few pieces at a time, because sealed
        pieces are copies."""
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
        """Give all buffers to the kernel, and remove them from the deque."""
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
