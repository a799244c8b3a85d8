"""Objects in a HiCache backend, and the lanes through which a server reads and writes them.

A backend may fail, hang, and recover at any time. Each page has one object for the KV of each
layer, and one for each E that is kept. So a plan reads only the layers that it loads, in its order.
A file backend is as fast per byte with objects of 64 KiB as with larger objects.

    bytes [0, 8)     magic and version
    bytes [8, 16)    size of the payload, little-endian
    bytes [16, 24)   checksum of the key and the payload
    bytes [24, ...)  payload

No object is trusted: its header must equal a header made anew from the expected key and the
payload.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Final

from cachetree import STALL_S, Calls, Clock, Kind, Location, ModelId, PageHash, Part, Step, steps_of
from cachetree.checkpoint import Family
from cachetree.memory import checksum_of_parts
from cachetree.transport import Backoff
from sglang_droidspeak.engine.hicache import Backend

log = logging.getLogger(__name__)

HICACHE: Final = Location("hicache")
"""Value of `Location` that stands for the HiCache backend."""
_MAGIC: Final = b"droidkv1"
_HEADER: Final = struct.Struct("<8sQQ")
_SLOT_UNIT: Final = 8192
"""Unit of the size of slots (buffers), in bytes. With this unit, each half of a slot is a multiple
of a memory page, as backends with direct I/O need."""
MAX_ABSENT: Final = 1 << 16
_KEYS_PER_CALL: Final = 128
"""Largest number of keys in one question to the backend. SGLang uses the same number."""
MAX_FAILURES: Final = 3
"""Failures in a row after which the lane pauses."""
MIN_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One object on its way between the backend and a slot (a buffer in host memory)."""

    page: int
    """Index of the page within the fetch or the entry."""
    step: Step
    key: str
    slot: int
    memory: memoryview
    """Bytes of the slot that the object fills."""

    def seal(self, payload: memoryview) -> None:
        body = self.memory[_HEADER.size :]
        body[:] = payload
        self.memory[: _HEADER.size] = _header(self.key, body)

    def opened(self) -> memoryview | None:
        """Return the payload of the object in the slot. None if it was not stored under this key,
        or is damaged."""
        body = self.memory[_HEADER.size :]
        return body if self.memory[: _HEADER.size] == _header(self.key, body) else None


class Objects:
    """Keys and sizes of one family's objects."""

    def __init__(self, family: Family) -> None:
        self._prefix: Final = f"droidspeak3-{family.digest[:16]}"
        self._family: Final = family
        largest = _HEADER.size + max(map(family.page_bytes, Kind))
        self.slot_bytes: Final = -(-largest // _SLOT_UNIT) * _SLOT_UNIT

    def steps(self, part: Part) -> tuple[Step, ...]:
        """Return the transfer steps (KV or E, and layer) of a page's objects, in the order of
        writing. If the backend has the first and the last object, the page counts as complete."""
        # A backend drops the oldest object first: the first object is lost before the others. The
        # last object is written after the others.
        return steps_of(part, self._family.num_layers)[::-1]

    def page_bytes(self, step: Step) -> int:
        return self._family.page_bytes(step.kind)

    def size(self, step: Step) -> int:
        return _HEADER.size + self.page_bytes(step)

    def key(self, model: ModelId, page: PageHash, step: Step) -> str:
        """Return the key of an object. The page hash in it covers tokens and tenant. The prefix
        covers sizes, dtype, tokenizer, RoPE and rank."""
        return f"{self._prefix}-{model}-{page.hex()}-{step.kind.value}{step.layer}"


def _header(key: str, body: memoryview) -> bytes:
    checksum = checksum_of_parts([memoryview(key.encode()), body])
    return _HEADER.pack(_MAGIC, body.nbytes, checksum)


class AbsentPages:
    """Pages that the backend lacked. Each is assumed to stay absent for some seconds.
    Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[tuple[ModelId, Part, PageHash], float] = OrderedDict()

    def add(self, model: ModelId, part: Part, page: PageHash, seconds: float) -> None:
        with self._lock:
            self._until_s.pop((model, part, page), None)
            self._until_s[model, part, page] = self._clock() + seconds
            if len(self._until_s) > MAX_ABSENT:
                self._until_s.popitem(last=False)

    def has(self, model: ModelId, part: Part, page: PageHash) -> bool:
        return self._until_s.get((model, part, page), 0.0) > self._clock()


class Lane:
    """Access to the backend for one purpose, reading or writing, with its own `slots` (buffers).
    After several failures it pauses.

    Thread-safe, but only one thread may move objects. Every call may hang, or raise any error of
    the backend. The caller reports each result with `fail` or `succeed`.
    """

    def __init__(
        self, purpose: str, backend: Backend, objects: Objects, slots: range, clock: Clock
    ) -> None:
        self._purpose: Final = purpose
        self._backend: Final = backend
        self._objects: Final = objects
        self._slots: Final = slots
        self._clock: Final = clock
        self._lock = threading.Lock()
        self._calls: Final = Calls(clock, STALL_S)
        self._num_failures = 0
        self._pauses: Final = Backoff(MIN_PAUSE_S)
        self._paused_until_s = 0.0
        self.longest_answer_s = 0.0
        """Seconds of the longest call of `num_leading`. The caller sets it back to 0."""

    @property
    def is_paused(self) -> bool:
        """Whether the backend should not be asked now: calls have failed recently, or one hangs."""
        return self._clock() < self._paused_until_s or self._calls.have_stalled

    def fail(self, cause: object) -> None:
        with self._lock:
            self._num_failures += 1
            if self._num_failures % MAX_FAILURES:
                return
            pause_s = self._pauses.next_s()
            self._paused_until_s = self._clock() + pause_s
        log.warning(
            "the HiCache backend fails at %s (%s); it is asked again in %.0f s",
            self._purpose,
            cause,
            pause_s,
        )

    def succeed(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._pauses.reset()

    def num_leading(self, model: ModelId, pages: Sequence[PageHash], step: Step) -> int:
        """Ask the backend how many leading pages have the object of this transfer step."""
        for start in range(0, len(pages), _KEYS_PER_CALL):
            part = pages[start : start + _KEYS_PER_CALL]
            keys = [self._objects.key(model, page, step) for page in part]
            begun_at_s = self._clock()
            with self._calls:
                num = self._backend.num_leading(keys)
            self.longest_answer_s = max(self.longest_answer_s, self._clock() - begun_at_s)
            if num < len(keys):
                return start + max(0, num)
        return len(pages)

    def batches(
        self, model: ModelId, pages: Sequence[PageHash], steps: Sequence[Step]
    ) -> Iterator[list[Piece]]:
        """Yield the objects of all pages, one transfer step after another. A batch has at most as
        many objects as there are slots."""
        named = ((step, index, page) for step in steps for index, page in enumerate(pages))
        while some := list(islice(named, len(self._slots))):
            pieces = []
            for (step, index, page), slot in zip(some, self._slots, strict=False):
                memory = self._backend.slots[slot][: self._objects.size(step)]
                key = self._objects.key(model, page, step)
                pieces.append(Piece(index, step, key, slot, memory))
            yield pieces

    def read(self, batch: Sequence[Piece]) -> list[tuple[Piece, bool]]:
        """Read a batch's objects from the backend into their slots. Return each, and whether it was
        there."""
        with self._calls:
            were_read = self._backend.read(*self._arguments(batch))
        return list(zip_longest(batch, were_read[: len(batch)], fillvalue=False))

    def write(self, batch: Sequence[Piece]) -> bool:
        """Store a batch's objects from their slots. False if the backend refused an object."""
        with self._calls:
            return self._backend.write(*self._arguments(batch))

    def _arguments(self, batch: Sequence[Piece]) -> tuple[list[str], list[int], list[int]]:
        return (
            [it.key for it in batch],
            [it.slot for it in batch],
            [it.memory.nbytes for it in batch],
        )
