"""The messages between a peer and a worker: msgpack, with bounds on their sizes.

A message ends with a checksum: without it a flipped bit could name another layer.

    peer                                    worker
    one of `verbs.ToWorker`     ──►                                     from an operator, no session
                                ◄──         one of `verbs.ToPeer`
    Hello                       ──►
                                ◄──         Hello                       both compare version, family
                                ◄══         Reset, Entries..., Synced   snapshot
                                ◄══         Entries...                  changes
    Learned                     ══►                                     answer to each Entries
    Fetch                       ══►
                                ◄══         frame + payload ...
                                ◄══         or Located ...              on the same host
                                ◄══         or Ended                    early
    Cancel                      ══►                                     of a fetch; also once all
                                ◄══         Ended                       located bytes were copied
    Ping                        ══►                                     both notice silence, and
                                ◄══         Pong                        loss of the last messages
    Bye                         ◄══►        Bye                         the session is over

    ── ZMQ     ══ the TCP connection that the worker's Hello permits, in frames of `frames`

The rules of a session are in the package's docstring. Nothing here opens a socket.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec

from cachetree.checkpoint import Family
from cachetree.clock import Clock, Deadline
from cachetree.errors import (
    UNREADABLE,
    DeadlineExceeded,
    FamilyMismatch,
    FetchError,
    ProtocolError,
    StaleEntry,
    printable,
)
from cachetree.ids import KV, MAX_LAYERS, Kind, PageHash, Step
from cachetree.memory import ArenaFile, checksum
from cachetree.transport import verbs
from cachetree.transport.frames import MAX_MESSAGE_BYTES, Frame, Ticket
from cachetree.transport.verbs import MAX_REASON_CHARS, ReasonText
from cachetree.tree import split_hashes

PROTOCOL_VERSION: Final = 12

MAX_REQUEST_S: Final = 60.0
"""Longest time in seconds that a worker serves one fetch."""

MAX_ENTRIES: Final = 256
"""Largest number of entries in one `Entries`."""

MAX_PLACES: Final = 256
"""Largest number of memory ranges in one `Located`."""

Model = Annotated[str, msgspec.Meta(max_length=128)]
"""Id of a model, of limited length."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""Name of a model, for people."""
PartOf = Annotated[int, msgspec.Meta(ge=KV, lt=MAX_LAYERS)]
"""Part of an entry: KV of all layers, or E of one layer, within the allowed range."""
Steps = Annotated[tuple[tuple[Kind, int], ...], msgspec.Meta(max_length=2 * MAX_LAYERS)]
Traceparent = Annotated[str, msgspec.Meta(max_length=55)]
Places = Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_PLACES)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of each side. `version` is compared before `family` is decoded."""

    version: int
    family: msgspec.Raw
    model: Model = ""
    """Model that the worker's server runs. Empty if it runs none, and in a peer's Hello."""
    epoch: int = 0
    """Random number of this start of the worker. 0 in a peer's Hello."""
    arena: ArenaFile | None = None
    """Shared memory from which a peer on the worker's host may copy. None in a peer's Hello."""
    ticket: Ticket | None = None
    """Ticket for the data connection. None in a peer's Hello, and if the peer is refused."""
    budget_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Largest number of bytes that the worker can store, in memory and on disk. 0 in a peer's
    Hello."""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """A snapshot begins: the peer has to forget all entries of this worker."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive pages of one model that the worker has added or removed. `parent` is the page
    before them; it is empty at the start of a prompt."""

    added: bool
    model: Model
    parent: bytes
    pages: bytes
    part: PartOf


class Entries(msgspec.Struct, frozen=True, kw_only=True, tag="entries"):
    """Some entries of the snapshot, or some of the changes after it."""

    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    names: Annotated[dict[Model, Name], msgspec.Meta(max_length=MAX_ENTRIES)] = {}
    """Names of models that this session has not sent yet."""


class Synced(msgspec.Struct, frozen=True, tag="synced"):
    """The snapshot is complete."""


class Learned(msgspec.Struct, frozen=True, tag="learned"):
    """Answer to each `Entries`: the peer's tree now has these changes."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Request to send these transfer steps (KV or E of one layer) of these pages, in order."""

    id: int
    """Id of the fetch, higher than all earlier ids of this session."""
    model: Model
    pages: bytes
    steps: Steps
    """Transfer steps (kind, layer), in the order in which they are needed."""
    first_byte: int = 0
    """First byte to send, counted over all transfer steps. Earlier bytes have landed already."""
    frame_bytes: int
    """Largest number of bytes of a frame's payload."""
    reads_arena: bool = False
    """True if the peer copies from the worker's shared memory itself."""
    timeout_ms: int
    """Ms from sending this message until the deadline. Clocks are not compared."""
    as_copy: bool = False
    """Whether the peer is a cache that keeps a copy. The fetch then does not count as a use of the
    pages, and reads no page from disk."""
    traceparent: Traceparent = ""
    """W3C traceparent of the request that needs the pages. Empty if the request is not traced."""


class Located(msgspec.Struct, frozen=True, kw_only=True, tag="located"):
    """Message in place of a frame: the payload is in the worker's shared memory, until a `Cancel`.

    The frame's checksum shows if the memory was reused meanwhile.
    """

    frame: Frame
    places: Places
    """Start and stop of each range in the shared memory, in bytes."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The peer ends a fetch: it ignores further frames, and no longer reads the worker's memory."""

    id: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The worker ends a fetch, and sends nothing more for it."""

    id: int
    error: str
    """Reason as a value of `Why`."""
    reason: ReasonText = ""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for a Pong."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to a Ping."""


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """End of a session, or answer outside of one: the peer has to send a Hello again."""

    reason: ReasonText


ToWorker = Hello | Learned | Fetch | Cancel | Ping | Bye | verbs.ToWorker
ToPeer = Hello | Reset | Entries | Synced | Located | Ended | Pong | Bye | verbs.ToPeer


class Why(StrEnum):
    """Reason why a fetch ended."""

    CANCELLED = "cancelled"
    STALE = "stale"
    DEADLINE = "deadline"
    PROTOCOL = "protocol"
    FAILED = "failed"


_ERRORS: Final = {
    Why.STALE: StaleEntry,
    Why.DEADLINE: DeadlineExceeded,
    Why.PROTOCOL: ProtocolError,
    Why.FAILED: FetchError,
}


_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_peer: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)
_family: msgspec.msgpack.Decoder[Family] = msgspec.msgpack.Decoder(Family)

_CHECKSUM_BYTES: Final = 8

_Message = TypeVar("_Message")


def encode(message: ToWorker | ToPeer) -> bytes:
    """Encode a message, with its checksum. Raises ProtocolError above MAX_MESSAGE_BYTES."""
    header = with_checksum(_encoder.encode(message))
    if len(header) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(header)} bytes exceeds {MAX_MESSAGE_BYTES}"
        )
    return header


def with_checksum(body: bytes) -> bytes:
    """Append the checksum to an encoded message."""
    return body + checksum(body).to_bytes(_CHECKSUM_BYTES, "little")


def decode_to_worker(header: memoryview) -> ToWorker:
    """Decode a message from a peer. Raises ProtocolError."""
    return _decode(_to_worker, header)


def decode_to_peer(header: memoryview) -> ToPeer:
    """Decode a message from a worker. Raises ProtocolError."""
    return _decode(_to_peer, header)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], header: memoryview) -> _Message:
    if header.nbytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a header of {header.nbytes} bytes exceeds {MAX_MESSAGE_BYTES}")
    body, seen = header[:-_CHECKSUM_BYTES], header[-_CHECKSUM_BYTES:]
    if checksum(body) != int.from_bytes(seen, "little"):
        raise ProtocolError("the checksum of a header is wrong; it was damaged on its way")
    try:
        return decoder.decode(body)
    except UNREADABLE as exc:
        raise ProtocolError(f"a header cannot be read: {reason(exc)}") from exc


def hello(
    family: Family,
    model: str,
    epoch: int,
    arena: ArenaFile | None = None,
    ticket: Ticket | None = None,
    budget_bytes: int = 0,
) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        family=msgspec.Raw(_encoder.encode(family)),
        model=model,
        epoch=epoch,
        arena=arena,
        ticket=ticket,
        budget_bytes=budget_bytes,
    )


def family_of(message: Hello) -> Family:
    """Return the family in a Hello. Raises ProtocolError if the versions differ, or the family
    cannot be read."""
    if message.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"version is {message.version} there and {PROTOCOL_VERSION} here; "
            "run one release of cachetree on both sides"
        )
    try:
        return _family.decode(message.family)
    except UNREADABLE as exc:
        raise ProtocolError(f"family cannot be read: {reason(exc)}") from exc


def require_family(message: Hello, ours: Family, *, who: str) -> None:
    """Raise FamilyMismatch if the Hello of `who` shows a family that cannot exchange caches with
    `ours`."""
    try:
        ours.require_equal(family_of(message), who=who)
    except ProtocolError as exc:
        raise FamilyMismatch(f"{who} cannot exchange caches with this server: {exc}") from exc


def ended_by(id: int, error: FetchError) -> Ended:
    why = next(why for why, kind in _ERRORS.items() if isinstance(error, kind))
    return Ended(id=id, error=why.value, reason=reason(error))


def error_of(message: Ended, who: str) -> FetchError:
    """Return the error for a fetch that worker `who` ended: a FetchError if the reason is
    unknown."""
    kinds = {why.value: kind for why, kind in _ERRORS.items()}
    return kinds.get(message.error, FetchError)(f"{who}: {said(message)}")


def reason(error: Exception) -> str:
    """Return an error's text on one line, short enough for a message."""
    return printable(str(error)[:MAX_REASON_CHARS])


def said(message: Ended | Bye | verbs.Denied) -> str:
    """Return the reason in a worker's message, on one line."""
    return printable(message.reason)


# Checks of received messages. All raise ProtocolError.


def pages_of(named: bytes) -> tuple[PageHash, ...]:
    """Return the pages that a message names."""
    try:
        return split_hashes(named)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc


def deadline_of(message: Fetch, clock: Clock) -> Deadline:
    """Return the fetch's deadline by `clock`, at most `MAX_REQUEST_S` from now."""
    return Deadline.after(min(max(message.timeout_ms, 0) / 1000, MAX_REQUEST_S), clock)


def steps_of(message: Fetch, num_layers: int) -> tuple[Step, ...]:
    """Return the transfer steps that a Fetch names. Raises ProtocolError if a step is named twice,
    or if its layer does not exist."""
    steps = tuple(Step(kind, layer) for kind, layer in message.steps)
    if len(set(steps)) != len(steps):
        raise ProtocolError("a fetch names a step twice")
    for step in steps:
        if not 0 <= step.layer < num_layers:
            raise ProtocolError(f"a fetch names layer {step.layer} of {num_layers}")
    return steps
