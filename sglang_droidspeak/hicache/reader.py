"""The thread that reads a plan's layers from a backend into its staging."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from cachetree import DeadlineExceeded, FetchError, ModelId, NoteSpeed, PageHash, StaleEntry, Turns
from cachetree.memory import Staging
from cachetree.transport import LogLimiter
from cachetree.tree import CacheTree
from sglang_droidspeak.hicache.lane import Lane
from sglang_droidspeak.hicache.objects import HICACHE, Piece
from sglang_droidspeak.hicache.search import ABSENT_S, AbsentPages

log = logging.getLogger(__name__)

_Fetch = tuple[ModelId, Sequence[PageHash], Staging]

BROKEN_S: Final = 60.0
"""How long a page is left alone that is in the backend, but not whole or not right."""


class Reader:
    """Fetches, one after another, through slots of its own.

    A call that hangs keeps its slots, never a staging, whose readers give up at its deadline.
    """

    def __init__(
        self, tree: CacheTree, lane: Lane, absent: AbsentPages, note_speed: NoteSpeed
    ) -> None:
        self._tree = tree
        self._lane = lane
        self._absent = absent
        self._note_speed = note_speed
        self._lines = LogLimiter(lane.clock)
        self.turns: Final[Turns[_Fetch]] = Turns("hicache-read", self._read_all)

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        if self._lane.breaker.is_open or not self.turns.put((model, pages, staging)):
            staging.fail(FetchError("the HiCache backend is paused or closed"))

    # In the thread.

    def _read_all(self, fetches: Iterator[_Fetch]) -> None:
        breaker, clock = self._lane.breaker, self._lane.clock
        for model, pages, staging in fetches:
            begun_at_s = clock()
            try:
                self._read(model, pages, staging)
                breaker.succeed()
                self._note_speed(staging.num_bytes, clock() - begun_at_s)
            except FetchError as exc:
                staging.fail(exc)
            except Exception as exc:  # noqa: BLE001  # The breaker counts it, and says so.
                breaker.fail(repr(exc))
                self._lane.count("failed", 1)
                self._lose(model, pages, ABSENT_S)
                staging.fail(FetchError(f"the HiCache backend failed: {exc!r}"))
            del staging

    def _read(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        lane = self._lane
        for batch in lane.batches(model, pages, staging.steps):
            if staging.error is not None:
                raise staging.error
            if staging.deadline.has_passed:
                raise DeadlineExceeded("the HiCache backend was not fast enough")
            try:
                found = lane.read(batch)
            except Exception as exc:
                culprit = self._culprit(batch, exc)
                self._note_damage(culprit)
                self._lose(model, pages[culprit.page :], BROKEN_S)
                raise StaleEntry(f"{culprit.key} cannot be read") from exc
            for index, piece in enumerate(batch):
                is_there, memory = index < len(found) and found[index], lane.memory(index)
                payload = lane.objects.open(piece.key, piece.step, memory) if is_there else None
                if payload is None:
                    if is_there:
                        self._note_damage(piece)
                    else:
                        lane.count("missing", 1)
                    self._lose(model, pages[piece.page :], BROKEN_S)
                    raise StaleEntry(f"{piece.key} is {'damaged' if is_there else 'not there'}")
                staging.write(piece.step, piece.page * payload.nbytes, payload)
            lane.count("read", len(batch))

    def _lose(self, model: ModelId, pages: Sequence[PageHash], seconds: float) -> None:
        """The first of these pages could not be read: it is taken to stay away for so long."""
        self._absent.add(model, pages[0], seconds)
        self._tree.drop_remote(HICACHE, model, pages)

    def _note_damage(self, piece: Piece) -> None:
        self._lane.count("damaged", 1)
        if self._lines.may("damage"):
            log.warning(
                "object %s of the HiCache backend is damaged or not ours; others that are found "
                "within %.0f s are counted and not logged",
                piece.key,
                LogLimiter.EVERY_S,
            )

    def _culprit(self, batch: Sequence[Piece], error: Exception) -> Piece:
        """The one object for which a batch failed; raises `error` where the backend does."""
        culprit, is_well = None, False
        for piece in batch:
            try:
                self._lane.read([piece])
                is_well = True
            except Exception:  # noqa: BLE001  # The batch's is reported.
                if culprit is not None:
                    break
                culprit = piece
            if culprit is not None and is_well:
                return culprit
        raise error
