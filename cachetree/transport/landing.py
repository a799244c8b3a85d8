"""One fetch as the peer sees it: frames checked and placed into a staging buffer, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachetree.checkpoint.family import Family
from cachetree.errors import ProtocolError
from cachetree.ids import ModelId, PageHash, Span
from cachetree.memory.arena import ArenaReader
from cachetree.memory.checksum import checksum_of_parts
from cachetree.memory.staging import Staging
from cachetree.transport.frames import Frame
from cachetree.transport.wire import Fetch, Located, join_pages

NOT_ASKED: Final = 0
"""In place of a request's id."""


class Landing:
    """Places the frames of one fetch, over one request or several. For the peer's thread only.

    What has been placed was verified and stays; the next request begins behind it.
    """

    def __init__(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        self.staging: Final = staging
        self.id = NOT_ASKED
        """Of the request under way."""
        self.num_requests = 0
        self.asked_at_s = 0.0
        self.broken_at_s = 0.0
        """When the last request broke off."""
        self.asked_at_bytes = 0
        """What the link had carried when the request was sent."""
        self._model = model
        self._pages = pages
        self._sizes = [staging.view(step).nbytes for step in staging.steps]
        self._step = 0
        self._offset = 0
        self._placed_bytes = self._credited_bytes = 0
        self.over: Final[set[str]] = set()
        """The connections that say that nothing more comes for the request."""
        self._skip_empty()

    @property
    def is_complete(self) -> bool:
        return self._step == len(self._sizes)

    def fits(self, family: Family) -> bool:
        """Whether every step has the size of all pages."""
        return self._sizes == [
            len(self._pages) * family.page_bytes(step.kind) for step in self.staging.steps
        ]

    def request(
        self, id: int, *, frame_bytes: int, window_bytes: int, reads_arena: bool = False
    ) -> Fetch:
        """Ask for what has not been placed yet."""
        self.id = id
        self.num_requests += 1
        self._placed_bytes = self._credited_bytes = 0
        self.over.clear()
        return Fetch(
            id=id,
            model=self._model,
            pages=join_pages(self._pages),
            steps=tuple((step.kind.value, step.layer) for step in self.staging.steps),
            first_step=self._step,
            first_offset=self._offset,
            frame_bytes=frame_bytes,
            window_bytes=window_bytes,
            reads_arena=reads_arena,
            timeout_ms=int(self.staging.deadline.remaining_s() * 1000),
        )

    @property
    def placed_bytes(self) -> int:
        """Since the request."""
        return self._placed_bytes

    def read(self, located: Located, arena: ArenaReader) -> None:
        """Copy and verify; raises as `room` and `land` do.

        The lease keeps the worker's memory until the next credit.
        """
        places = [Span(*place) for place in located.places if 0 <= place[0] < place[1]]
        if sum(map(len, places)) != located.size or len(places) < len(located.places):
            raise ProtocolError(f"{located.places} are not places of {located.size} bytes")
        room = self.room(located)
        try:
            digest = checksum_of_parts(arena.copy_in_pieces(room, places))
        except OSError as exc:
            raise ProtocolError(f"the worker's memory cannot be read: {exc}") from exc
        self.land(located, is_sound=digest == located.checksum)

    def room(self, frame: Frame | Located) -> memoryview:
        """Where the next frame goes; raises ProtocolError, or what ended the staging."""
        if self.is_complete or (frame.step, frame.offset) != (self._step, self._offset):
            raise ProtocolError(
                f"a frame for step {frame.step} at {frame.offset} came where step {self._step} "
                f"at {self._offset} was due"
            )
        if not 0 < frame.size <= self._sizes[self._step] - self._offset:
            raise ProtocolError(
                f"a frame of {frame.size} bytes at {self._offset} does not fit step "
                f"{self._step} of {self._sizes[self._step]} bytes"
            )
        return self.staging.room(self.staging.steps[self._step], self._offset, frame.size)

    def land(self, frame: Frame | Located, *, is_sound: bool) -> None:
        """Count what was put into the last `room`; raises ProtocolError where it is not sound."""
        if not is_sound:
            raise ProtocolError(
                f"the checksum of step {frame.step} at {frame.offset} is wrong; the bytes were "
                "damaged on their way"
            )
        self.staging.land(self.staging.steps[self._step], frame.size)
        self._offset += frame.size
        self._placed_bytes += frame.size
        self._skip_empty()

    def take_credit(self, least: int = 1) -> int:
        """Bytes placed since the request, where that many are news; 0 where they are not."""
        if self.is_complete or self._placed_bytes - self._credited_bytes < least:
            return 0
        self._credited_bytes = self._placed_bytes
        return self._placed_bytes

    def repeat_credit(self) -> None:
        """The last one may have been lost: let `take_credit` give it again."""
        self._credited_bytes = 0

    def _skip_empty(self) -> None:
        while not self.is_complete and self._offset == self._sizes[self._step]:
            self._step += 1
            self._offset = 0
