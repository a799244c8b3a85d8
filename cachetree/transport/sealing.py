"""Where a session goes on once CURVE has proved who is who, and how its messages are sealed.

    peer                              worker, `listen`: CURVE
    Hello                     ──►
                              ◄──     Hello with a Ticket: port, token and key of the session
    leaves
                                      worker, `bulk_port`: TCP in clear
    token                     ──►     let in once, and only with one that was given out
    Subscribe, Fetch, ...     ◄─►     every header sealed with the key, payloads too or not

The n-th message of a direction is sealed as the n-th, so that one that was changed, lost, repeated
or put elsewhere cannot be opened; what is behind it cannot either, and the connection is over. A
key serves one connection, and no number twice.
"""

from __future__ import annotations

import secrets
import struct
from typing import Annotated, Final, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cachetree.errors import ProtocolError

Bulk = Literal["curve", "aes-gcm", "clear"]
"""What protects payloads between servers with keys. All else is encrypted in any case.

    curve       CURVE: one connection for everything
    aes-gcm     AES-256-GCM
    clear       nothing: others can read them, and change them with skill
"""

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
"""What a seal adds to a message."""

_TOKEN_BYTES: Final = 32


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Lets its holder in at the worker's other port. Neither `str` nor `repr` shows the key."""

    bulk: Literal["aes-gcm", "clear"]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """On the host of the worker's address."""
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    """Printable. Anyone on the way sees it: it opens a door, once, and no message."""
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

    def __repr__(self) -> str:
        return f"Ticket(bulk={self.bulk!r}, port={self.port})"


def new_ticket(bulk: Literal["aes-gcm", "clear"], port: int) -> Ticket:
    token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
    return Ticket(bulk=bulk, port=port, token=token, key=secrets.token_bytes(KEY_BYTES))


class Unsealed:
    """Messages go as they are: CURVE sees to them, or nothing does."""

    def seal(self, header: bytes) -> bytes:
        return header

    def seal_payload(self, payload: memoryview) -> memoryview:
        """The payload of the header sealed last. What is returned may be `payload` itself."""
        return payload

    def open(self, header: memoryview) -> memoryview:
        """Raises ProtocolError, as does `open_payload`; then the connection has to end."""
        return header

    def open_payload(self, payload: memoryview) -> memoryview:
        """The payload of the header opened last."""
        return payload


UNSEALED: Final = Unsealed()


class HeaderSeals(Unsealed):
    """AES-256-GCM over headers. Payloads go in clear; their checksums are in the headers."""

    def __init__(self, key: bytes, *, is_worker: bool) -> None:
        self._cipher = AESGCM(key)
        self._is_worker = is_worker
        self._num_sealed = self._num_opened = 0

    def seal(self, header: bytes) -> bytes:
        self._num_sealed += 1
        return self._cipher.encrypt(self._seal_nonce(), header, None)

    def open(self, header: memoryview) -> memoryview:
        self._num_opened += 1
        return self._open(header, self._open_nonce())

    def _seal_nonce(self, *, is_payload: bool = False) -> bytes:
        return _nonce(self._num_sealed, by_worker=self._is_worker, is_payload=is_payload)

    def _open_nonce(self, *, is_payload: bool = False) -> bytes:
        return _nonce(self._num_opened, by_worker=not self._is_worker, is_payload=is_payload)

    def _open(self, sealed: memoryview, nonce: bytes) -> memoryview:
        try:
            return memoryview(self._cipher.decrypt(nonce, sealed, None))
        except InvalidTag as exc:
            raise ProtocolError(
                "a message, or one before it, was changed, lost or repeated on its way"
            ) from exc


class Seals(HeaderSeals):
    """AES-256-GCM over headers and payloads."""

    def seal_payload(self, payload: memoryview) -> memoryview:
        sealed = self._cipher.encrypt(self._seal_nonce(is_payload=True), payload, None)
        return memoryview(sealed)

    def open_payload(self, payload: memoryview) -> memoryview:
        return self._open(payload, self._open_nonce(is_payload=True))


def seals_of(ticket: Ticket, *, is_worker: bool) -> HeaderSeals:
    """For one connection: make them once on each side."""
    kind = Seals if ticket.bulk == "aes-gcm" else HeaderSeals
    return kind(ticket.key, is_worker=is_worker)


def _nonce(number: int, *, by_worker: bool, is_payload: bool) -> bytes:
    """12 bytes, never the same twice under one key; a header and its payload share a number."""
    return struct.pack(">??xxQ", by_worker, is_payload, number)
