"""What goes over a data connection: how it is opened, its frames, and how these are sealed.

Frames are headers of one size, each followed by its payload.

    bytes [0, 8)      id of the fetch; 0 where the payload is a message of `wire`
    bytes [8, 16)     where it begins, in all steps of that side by side
    bytes [16, 24)    XXH3-64 of the payload
    bytes [24, 28)    size of the payload

All numbers are little-endian. No frame has bytes of two steps.

    peer                              worker, `listen`: CURVE where there are keys
    Hello                     ──►
                              ◄──     Hello with a Ticket: port, token and key of the session
                                      worker, `bulk_port`: TCP in clear
    token                     ──►     let in once, and only with one that was given out
    Frame, payload            ◄─►     sealed with the key, header and payload; where there are no
                                      keys in clear, and each header with a checksum

The n-th thing of a direction, a header or a piece of a payload, is sealed as the n-th, so that one
that was changed, lost, repeated or put elsewhere cannot be opened; what is behind it cannot either,
and the connection is over. The checksum of the n-th header in clear is that of the n-th likewise:
nothing above has to look for what got lost. A key serves one connection, and no number twice.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cachetree.errors import ProtocolError

MAX_FRAME_BYTES: Final = 64 << 20
"""Largest payload that may be asked for, and that is taken."""

MIN_FRAME_BYTES: Final = 4096
"""Smallest that a peer may ask a worker to keep to."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Largest message that either side takes, however it comes; a fetch may name 60,000 pages."""

MESSAGE: Final = 0
"""In place of a request's id, where the payload is a message."""

_FIELDS: Final = struct.Struct("<QQQI")
HEADER_BYTES: Final = _FIELDS.size

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
"""What a seal adds."""

TOKEN_BYTES: Final = 32

PIECE_BYTES: Final = 256 << 10
"""Payloads are sealed, received and read again for their checksum in pieces of this size: far
below a core's cache."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the payload behind it: the next `size` bytes of a fetch."""

    id: int
    offset: int
    """Of all bytes of all steps, how many come before it."""
    size: int
    checksum: int
    """XXH3-64 of the payload."""


def pack(frame: Frame) -> bytes:
    return _FIELDS.pack(frame.id, frame.offset, frame.checksum, frame.size)


def unpack(header: memoryview | bytes) -> Frame:
    """Raises ProtocolError."""
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a header of a frame has {len(header)} bytes, not {HEADER_BYTES}")
    id, offset, digest, size = _FIELDS.unpack_from(header)
    return Frame(id=id, offset=offset, size=size, checksum=digest)


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Lets its holder in at the worker's `bulk_port`. Neither `str` nor `repr` shows the key."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """On the host of the worker's address."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Anyone on the way sees it: it opens a door, once, and no message."""
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    """Of the seals, where both sides have proved who they are; of no use where they have not."""

    def __repr__(self) -> str:
        return f"Ticket(port={self.port})"


def new_ticket(port: int) -> Ticket:
    token, key = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(KEY_BYTES)
    return Ticket(port=port, token=token, key=key)


class Unsealed:
    """Headers with a checksum, payloads as they are: against accidents alone. For one connection:
    make them once on each side."""

    header_tag_bytes = 8
    piece_tag_bytes = 0

    def __init__(self) -> None:
        self._num_sealed = self._num_opened = 0

    def seal(self, header: bytes) -> bytes:
        self._num_sealed += 1
        return header + xxhash.xxh3_64_digest(header, self._num_sealed)

    def seal_payload(self, payload: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
        """Of the header sealed last; what is yielded may be the parts of `payload` themselves."""
        yield from payload

    def open(self, header: memoryview) -> memoryview | bytes:
        """Raises ProtocolError, as does `open_piece`; then the connection has to end."""
        self._num_opened += 1
        clear, tag = header[: -self.header_tag_bytes], header[-self.header_tag_bytes :]
        if xxhash.xxh3_64_digest(clear, self._num_opened) != tag:
            raise ProtocolError(
                "the checksum of a header is wrong: it was damaged on its way, or one before it "
                "was lost or repeated"
            )
        return clear

    def open_piece(self, sealed: memoryview, into: memoryview) -> None:
        """The next piece of a payload; where pieces have no tags both are the same memory."""


class Seals(Unsealed):
    """AES-256-GCM over headers and payloads."""

    header_tag_bytes = TAG_BYTES
    piece_tag_bytes = TAG_BYTES

    def __init__(self, key: bytes, *, is_worker: bool) -> None:
        super().__init__()
        self._cipher = AESGCM(key)
        self._is_worker = is_worker

    def seal(self, header: bytes | memoryview) -> bytes:
        self._num_sealed += 1
        nonce = _nonce(self._num_sealed, by_worker=self._is_worker)
        return self._cipher.encrypt(nonce, header, None)

    def seal_payload(self, payload: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
        whole = payload[0] if len(payload) == 1 else memoryview(b"".join(payload))
        for at in range(0, whole.nbytes, PIECE_BYTES):
            yield self.seal(whole[at : at + PIECE_BYTES])

    def open(self, header: memoryview) -> memoryview | bytes:
        clear = memoryview(bytearray(max(0, header.nbytes - TAG_BYTES)))
        self.open_piece(header, clear)
        return clear

    def open_piece(self, sealed: memoryview, into: memoryview) -> None:
        self._num_opened += 1
        nonce = _nonce(self._num_opened, by_worker=not self._is_worker)
        try:
            self._cipher.decrypt_into(nonce, sealed, None, into)
        except InvalidTag as exc:
            raise ProtocolError(
                "a message, or one before it, was changed, lost or repeated on its way"
            ) from exc


def _nonce(number: int, *, by_worker: bool) -> bytes:
    """12 bytes, never the same twice under one key."""
    return struct.pack(">?xxxQ", by_worker, number)
