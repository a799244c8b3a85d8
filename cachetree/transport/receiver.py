"""Receive pages: check each frame, and write it directly to its place in the staging memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from cachetree.errors import FetchError, ProtocolError
from cachetree.ids import ModelId, PageHash, Span
from cachetree.memory import ArenaReader, Staging, checksum_of_parts
from cachetree.transport.frames import Frame
from cachetree.transport.wire import Located

NOT_ASKED: Final = 0
"""Request id of a fetch without a running request."""


class FrameReceiver:
    """Write the frames of one fetch into its staging. Used by one thread.

    A fetch may take several requests. Bytes that have landed are verified and stay: the next
    request begins behind them. Only this object writes into `staging`.
    """

    def __init__(
        self,
        model: ModelId,
        pages: Sequence[PageHash],
        staging: Staging,
        landed: Callable[[FrameReceiver, int], None],
        broke: Callable[[FrameReceiver, FetchError], None],
    ) -> None:
        """`landed` is called with the number of newly verified bytes. `broke` is called for a wrong
        frame, and if the staging has ended."""
        self.model: Final = model
        self.pages: Final = pages
        self.staging: Final = staging
        self.id = NOT_ASKED
        """Id of the running request."""
        self.num_requests = 0
        self.since_s = 0.0
        """Time at which the peer sent the fetch's latest request to the worker. If this request was
        interrupted: the time of the interruption."""
        self.asked_at_bytes = 0
        """Bytes that the connection had delivered when the request was sent."""
        self._stops = list(accumulate(staging.sizes.values()))
        """End of each transfer step, in bytes from the beginning of the fetch."""
        self._landed = landed
        self._broke = broke

    def read(self, located: Located, arena: ArenaReader) -> None:
        """Copy bytes out of the worker's memory, and verify them.

        The worker's lease protects this memory until the peer's Cancel says that all is copied.
        """
        frame = located.frame
        try:
            places = [Span(*place) for place in located.places if 0 <= place[0] < place[1]]
            num_bytes = sum(it.stop - it.start for it in places)
            if num_bytes != frame.size or len(places) < len(located.places):
                raise ProtocolError(f"{located.places} are not places of {frame.size} bytes")
            digest = checksum_of_parts(arena.copy_in_pieces(self._room(frame), places))
        except FetchError as exc:
            self._broke(self, exc)
        except OSError as exc:
            self._broke(self, ProtocolError(f"the worker's memory cannot be read: {exc}"))
        else:
            self.mark_received(frame, is_sound=digest == frame.checksum)

    def buffer_for(self, frame: Frame) -> memoryview | None:
        """Return the memory for the next frame's payload. If the frame is wrong, call `broke` and
        return None."""
        try:
            return self._room(frame)
        except FetchError as exc:
            self._broke(self, exc)
            return None

    def is_pending(self, frame: Frame) -> bool:
        """Whether this frame's payload may still be written to the memory from `buffer_for`. It may
        not once the frame's request, or the staging, has ended."""
        return frame.id == self.id and self.staging.error is None

    def mark_received(self, frame: Frame, *, is_sound: bool) -> None:
        """Count a frame after its whole payload has arrived in the memory from `buffer_for`.
        `is_sound` says whether its checksum is right. Call it only while `is_pending`."""
        if is_sound:
            self.staging.land(self.staging.steps[self._step_at(frame.offset)], frame.size)
            self._landed(self, frame.size)
        else:
            why = (
                f"the checksum of {frame.size} bytes at byte {frame.offset} is wrong; they were "
                "damaged on their way"
            )
            self._broke(self, ProtocolError(why))

    def _room(self, frame: Frame) -> memoryview:
        """Return the memory for a frame in the staging. Raises ProtocolError for a wrong frame, or
        the error that ended the staging."""
        staging = self.staging
        if staging.is_complete or frame.offset != staging.num_landed_bytes:
            raise ProtocolError(
                f"a frame came at byte {frame.offset} where byte {staging.num_landed_bytes} of "
                f"{staging.num_bytes} was due"
            )
        number = self._step_at(frame.offset)
        step, rest = staging.steps[number], self._stops[number] - frame.offset
        if not 0 < frame.size <= rest:
            raise ProtocolError(
                f"a frame of {frame.size} bytes at byte {frame.offset} does not fit the {rest} "
                f"bytes that are left of step {number}"
            )
        return staging.room(step, staging.sizes[step] - rest, frame.size)

    def _step_at(self, offset: int) -> int:
        """Return the index of the transfer step that has the byte at this offset."""
        return bisect_right(self._stops, offset)
