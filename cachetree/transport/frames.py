"""Frames of a data connection: their form, their seals, and the ticket that opens a connection.

A frame is a header of 28 bytes and its payload. A seal protects both: with keys, encryption that
also finds changes; without keys, a checksum of the header.

    bytes [0, 8)    id of the fetch; 0 if the payload is a message of `wire`
    bytes [8, 16)   position of the payload's first byte in the fetch, over all transfer steps
    bytes [16, 24)  XXH3-64 of the payload
    bytes [24, 28)  size of the payload

All numbers are little-endian. No frame has bytes of two transfer steps.

    peer                            worker, `listen`: CURVE if there are keys
    Hello                   ──►
                            ◄──     Hello with a Ticket: port, token and key of the session
                                    worker, `bulk_port`: TCP in clear
    token                   ──►     let in once, and only if the token was issued
    Frame, payload          ◄─►     header and payload sealed with the key; without keys in
                                    clear, and each header with a checksum

Payloads are sealed in pieces. Each direction numbers its headers and pieces, and a seal covers the
number. If a header or piece is changed, lost, repeated or moved, the next check fails, and the
connection ends. So no other code looks for losses. A key serves one connection, and seals each
number once.
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
"""Largest payload of a frame that a peer may request, and that this side accepts."""

MIN_FRAME_BYTES: Final = 4096
"""Smallest frame size that a peer may request."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Largest message that either side accepts, over ZMQ or TCP: room for a fetch of 60,000 pages."""

MESSAGE: Final = 0
"""Id of a frame with a message as payload."""

_FIELDS: Final = struct.Struct("<QQQI")
HEADER_BYTES: Final = _FIELDS.size

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
"""Bytes that a seal adds."""

TOKEN_BYTES: Final = 32

PIECE_BYTES: Final = 256 << 10
"""Number of bytes of a piece. Payloads are sealed, received and checked piece by piece, so that a
piece stays in a core's cache."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a frame. It describes the payload that follows: `size` bytes of a fetch."""

    id: int
    offset: int
    """Position of the payload's first byte in the fetch, in bytes. It is counted over the bytes of
    all transfer steps, in order."""
    size: int
    checksum: int
    """XXH3-64 of the payload."""


def pack(frame: Frame) -> bytes:
    return _FIELDS.pack(frame.id, frame.offset, frame.checksum, frame.size)


def unpack(header: memoryview | bytes) -> Frame:
    """Parse a header. Raises ProtocolError."""
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a header of a frame has {len(header)} bytes, not {HEADER_BYTES}")
    id, offset, digest, size = _FIELDS.unpack_from(header)
    return Frame(id=id, offset=offset, size=size, checksum=digest)


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Permission for one connection to the worker's `bulk_port`. Neither `str` nor `repr` shows its
    key."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Port on the host of the worker's address."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Token that is used once and sent in clear. It opens one connection, and decrypts nothing."""
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    """Key that encrypts the connection. Unused if the two sides have no key pairs."""

    def __repr__(self) -> str:
        return f"Ticket(port={self.port})"


def new_ticket(port: int) -> Ticket:
    token, key = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(KEY_BYTES)
    return Ticket(port=port, token=token, key=key)


class Unsealed:
    """Seals of a connection without keys. Headers have a checksum, and payloads are sent in clear.
    This protects against accidents only. Each side makes one object for each connection."""

    header_tag_bytes = 8
    piece_tag_bytes = 0

    def __init__(self) -> None:
        self._num_sealed = self._num_opened = 0

    def seal(self, header: bytes) -> bytes:
        self._num_sealed += 1
        return header + xxhash.xxh3_64_digest(header, self._num_sealed)

    def seal_payload(self, payload: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
        """Yield, in order, the bytes to send as payload of the last sealed header: encrypted
        pieces, or without keys `payload` itself."""
        yield from payload

    def open(self, header: memoryview) -> memoryview | bytes:
        """Check a header and return it decrypted. Raises ProtocolError; the caller then has to end
        the connection."""
        self._num_opened += 1
        clear, tag = header[: -self.header_tag_bytes], header[-self.header_tag_bytes :]
        if xxhash.xxh3_64_digest(clear, self._num_opened) != tag:
            raise ProtocolError(
                "the checksum of a header is wrong: the header was damaged on its way, or an "
                "earlier one was lost or repeated"
            )
        return clear

    def open_piece(self, sealed: memoryview, into: memoryview) -> None:
        """Check the next piece of a payload, and write it decrypted to `into`. Without keys both
        arguments are the same memory, and nothing is done. Raises ProtocolError, like `open`."""


class Seals(Unsealed):
    """Seals of a connection with keys: AES-256-GCM over headers and payloads."""

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
                "a message, or an earlier one, was changed, lost or repeated on its way"
            ) from exc


def _nonce(number: int, *, by_worker: bool) -> bytes:
    """Return the 12-byte nonce of a seal: who seals, and the seal's number."""
    return struct.pack(">?xxxQ", by_worker, number)
