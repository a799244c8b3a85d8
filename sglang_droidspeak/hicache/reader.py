"""The thread that reads a plan's layers from a backend into its staging."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from cachetree import Clock, DeadlineExceeded, FetchError, ModelId, NoteSpeed, PageHash, StaleEntry
from cachetree.memory import Staging
from sglang_droidspeak.hicache.counts import Counts
from sglang_droidspeak.hicache.guard import Guard
from sglang_droidspeak.hicache.objects import ObjectBackend, Objects, Piece

Lose = Callable[[ModelId, Sequence[PageHash], bool], None]
"""Takes pages, the first of which could not be read, and whether it is that page's fault."""


class Reader:
    """Fetches, one after another, through slots of its own.

    A call that hangs keeps its slots, never a staging, whose readers give up at its deadline.
    """

    def __init__(
        self,
        backend: ObjectBackend,
        objects: Objects,
        lane: range,
        lose: Lose,
        guard: Guard,
        counts: Counts,
        note_speed: NoteSpeed,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._objects = objects
        self._lane = lane
        self._lose = lose
        self._guard = guard
        self._counts = counts
        self._note_speed = note_speed
        self._clock = clock
        self._is_closed = False
        self._waiting: queue.SimpleQueue[tuple[ModelId, Sequence[PageHash], Staging] | None]
        self._waiting = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._read_for_ever, name="hicache-read", daemon=True
        )
        self._thread.start()

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        if self._is_closed or self._guard.is_open:
            staging.fail(FetchError("the HiCache backend is paused or closed"))
        else:
            self._waiting.put((model, pages, staging))

    def close(self, timeout_s: float) -> bool:
        """Whether the thread has ended; one that hangs in the backend is left behind."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # In the thread.

    def _read_for_ever(self) -> None:
        while (item := self._waiting.get()) is not None:
            model, pages, staging = item
            begun_at_s = self._clock()
            try:
                self._read(model, pages, staging)
                self._guard.succeed()
                self._note_speed(staging.num_bytes, self._clock() - begun_at_s)
            except FetchError as exc:
                staging.fail(exc)
            except Exception as exc:  # noqa: BLE001  # The guard counts it, and says so.
                self._guard.fail(repr(exc))
                self._counts.add("failed")
                self._lose(model, pages, False)
                staging.fail(FetchError(f"the HiCache backend failed: {exc!r}"))
            del item, staging

    def _read(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        for batch in self._objects.batches(model, pages, staging.steps, len(self._lane)):
            if staging.error is not None:
                raise staging.error
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the HiCache backend was not fast enough")
            try:
                found = self._fill(batch)
            except Exception as exc:
                culprit = self._culprit(batch, exc)
                self._counts.add_damaged(culprit.key)
                self._lose(model, pages[culprit.page :], True)
                raise StaleEntry(f"{culprit.key} cannot be read") from exc
            for index, piece in enumerate(batch):
                slot = self._backend.slots[self._lane[index]]
                is_there = index < len(found) and found[index]
                payload = self._objects.open(piece.key, piece.step, slot) if is_there else None
                if payload is None:
                    if is_there:
                        self._counts.add_damaged(piece.key)
                    else:
                        self._counts.add("missing")
                    self._lose(model, pages[piece.page :], True)
                    raise StaleEntry(f"{piece.key} is {'damaged' if is_there else 'not there'}")
                staging.write(piece.step, piece.page * payload.nbytes, payload)
            self._counts.add("read", len(batch))

    def _fill(self, batch: Sequence[Piece]) -> Sequence[bool]:
        """Read objects into slots; which of them were there."""
        sizes = [self._objects.size(piece.step) for piece in batch]
        with self._guard.call():
            return self._backend.read([it.key for it in batch], self._lane[: len(batch)], sizes)

    def _culprit(self, batch: Sequence[Piece], error: Exception) -> Piece:
        """The one object for which a batch failed; raises `error` where the backend does."""
        culprit, is_well = None, False
        for piece in batch:
            try:
                self._fill([piece])
                is_well = True
            except Exception:  # noqa: BLE001  # The batch's is reported.
                if culprit is not None:
                    break
                culprit = piece
            if culprit is not None and is_well:
                return culprit
        raise error
