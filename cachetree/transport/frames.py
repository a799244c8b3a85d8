"""The frames of a data connection: headers of one size, each followed by its payload.

    bytes [0, 8)      id of the fetch or store; 0 where the payload is a message of `wire`
    bytes [8, 16)     offset in the step
    bytes [16, 24)    XXH3-64 of the payload
    bytes [24, 28)    number of the step
    bytes [28, 32)    size of the payload

All numbers are little-endian. `sealing` wraps each header, and with keys each piece of a payload.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from cachetree.errors import ProtocolError

MAX_FRAME_BYTES: Final = 64 << 20
"""Largest payload that may be configured."""

MIN_FRAME_BYTES: Final = 4096
"""Smallest payload frame that either side may ask the other to keep to."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Largest message that comes among the frames; a fetch may name 60,000 pages."""

MESSAGE: Final = 0
"""In place of a request's id, where the payload is a message."""

_FIELDS: Final = struct.Struct("<QQQII")
HEADER_BYTES: Final = _FIELDS.size


class Flow(NamedTuple):
    """How a stream of frames is bounded."""

    frame_bytes: int
    """Largest payload."""
    window_bytes: int
    """Most bytes sent and not credited."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the payload behind it: `size` bytes of step number `step`."""

    id: int
    step: int
    offset: int
    size: int
    checksum: int
    """XXH3-64 of the payload."""


def pack(frame: Frame) -> bytes:
    """The header of a frame."""
    return _FIELDS.pack(frame.id, frame.offset, frame.checksum, frame.step, frame.size)


def unpack(header: memoryview | bytes) -> Frame:
    """Raises ProtocolError."""
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a header of a frame has {len(header)} bytes, not {HEADER_BYTES}")
    id, offset, digest, step, size = _FIELDS.unpack_from(header)
    return Frame(id=id, step=step, offset=offset, size=size, checksum=digest)
