"""Receiving pages: frames checked and placed straight where they stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachetree.checkpoint import Family
from cachetree.errors import ProtocolError
from cachetree.ids import ModelId, PageHash, Span
from cachetree.memory import ArenaReader, Staging, checksum_of_parts
from cachetree.transport.frames import Frame
from cachetree.transport.wire import Fetch, Located
from cachetree.tree import join_hashes

NOT_ASKED: Final = 0
"""In place of a request's id."""


class FetchReceiver:
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
        self._sizes = list(staging.sizes.values())
        self._step = 0
        self._offset = 0
        self._skip_empty()

    @property
    def is_complete(self) -> bool:
        return self._step == len(self._sizes)

    @property
    def rest_bytes(self) -> int:
        """Not placed yet."""
        return self.staging.num_bytes - self.staging.num_landed_bytes

    def fits(self, family: Family) -> bool:
        """Whether every step has the size of all pages."""
        return self._sizes == [
            len(self._pages) * family.page_bytes(step.kind) for step in self.staging.steps
        ]

    def request(self, id: int, *, frame_bytes: int, reads_arena: bool) -> Fetch:
        """Ask for what has not been placed yet."""
        self.id = id
        self.num_requests += 1
        return Fetch(
            id=id,
            model=self._model,
            pages=join_hashes(self._pages),
            steps=tuple((step.kind, step.layer) for step in self.staging.steps),
            first_step=self._step,
            first_offset=self._offset,
            frame_bytes=frame_bytes,
            reads_arena=reads_arena,
            timeout_ms=int(self.staging.deadline.remaining_s() * 1000),
            traceparent=self.staging.traceparent,
        )

    def read(self, located: Located, arena: ArenaReader) -> None:
        """Copy and verify; raises as `buffer_for` and `mark_received` do.

        The lease keeps the worker's memory until it hears that all of it was copied.
        """
        places = [Span(*place) for place in located.places if 0 <= place[0] < place[1]]
        size = located.frame.size
        if sum(map(len, places)) != size or len(places) < len(located.places):
            raise ProtocolError(f"{located.places} are not places of {size} bytes")
        buffer = self.buffer_for(located.frame)
        try:
            digest = checksum_of_parts(arena.copy_in_pieces(buffer, places))
        except OSError as exc:
            raise ProtocolError(f"the worker's memory cannot be read: {exc}") from exc
        self.mark_received(located.frame, is_sound=digest == located.frame.checksum)

    def buffer_for(self, frame: Frame) -> memoryview:
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

    def mark_received(self, frame: Frame, *, is_sound: bool) -> None:
        """Count what was put into the last buffer; raises ProtocolError where it is not sound."""
        if not is_sound:
            raise ProtocolError(
                f"the checksum of step {frame.step} at {frame.offset} is wrong; the bytes were "
                "damaged on their way"
            )
        self.staging.land(self.staging.steps[self._step], frame.size)
        self._offset += frame.size
        self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.is_complete and self._offset == self._sizes[self._step]:
            self._step += 1
            self._offset = 0
