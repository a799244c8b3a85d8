"""The messages of the transport: msgpack, and what bounds their sizes.

A message ends with a checksum: without it a flipped bit could name another layer.

    peer                                  worker
    one of `verbs.ToWorker`   ──►                                     an operator's, no session
                              ◄──         one of `verbs.ToPeer`
    Hello                     ──►
                              ◄──         Hello                       both compare version, family
                              ◄══         Reset, Entries..., Synced   snapshot
                              ◄══         Entries...                  what changes
    Learned                   ══►                                     of each Entries, applied
    Fetch                     ══►
                              ◄══         frame + payload ...
                              ◄══         or Located ...              on the same host
                              ◄══         or Ended                    early
    Cancel                    ══►                                     of a fetch; and where all
                              ◄══         Ended                       was copied
    Ping                      ══►                                     both notice silence, and what
                              ◄══         Pong                        was lost at the very end
    Bye                       ◄══►        Bye                         the session is over

    ── ZMQ     ══ the connection that a Hello's ticket opens, among the frames of `frames`

Over that connection all comes in order, or it ends (`frames`), and what was asked for is asked for
again over the next one. Unknown fields are ignored, unknown tags are refused. Nothing here opens a
socket.
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
"""Longest that a worker serves one fetch."""

MAX_ENTRIES: Final = 256
"""In one `Entries`."""

MAX_PLACES: Final = 256
"""In one `Located`."""

Model = Annotated[str, msgspec.Meta(max_length=128)]
"""A model's id. A worker that advertises it tells all its peers."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""Of a model, for a person."""
PartOf = Annotated[int, msgspec.Meta(ge=KV, lt=MAX_LAYERS)]
"""A `Part`."""
Steps = Annotated[tuple[tuple[Kind, int], ...], msgspec.Meta(max_length=2 * MAX_LAYERS)]
Traceparent = Annotated[str, msgspec.Meta(max_length=55)]
Places = Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_PLACES)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of both sides. `family` is decoded only after `version` was compared."""

    version: int
    family: msgspec.Raw
    model: Model = ""
    """The model this server runs; empty where it serves none itself, and from a peer."""
    epoch: int = 0
    """Random id of a worker's life; 0 from a peer."""
    arena: ArenaFile | None = None
    """From where a peer on the worker's host may copy; None from a peer."""
    ticket: Ticket | None = None
    """For the data connection; None from a peer, and to one that is refused."""
    budget_bytes: int = 0
    """What a worker keeps at most, in memory and on disk; 0 from a peer."""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """A snapshot begins: forget all entries of this worker."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Pages, one after the other, that appeared or went. `parent` is empty at the root."""

    added: bool
    model: Model
    parent: bytes
    pages: bytes
    part: PartOf


class Entries(msgspec.Struct, frozen=True, kw_only=True, tag="entries"):
    """A part of the snapshot, or of what changed since."""

    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    names: Annotated[dict[Model, Name], msgspec.Meta(max_length=MAX_ENTRIES)] = {}
    """Names of models that this session has not told yet."""


class Synced(msgspec.Struct, frozen=True, tag="synced"):
    """The snapshot is complete."""


class Learned(msgspec.Struct, frozen=True, tag="learned"):
    """The peer's own tree shows the next `Entries`; each is answered so."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Stream these steps of these pages, in this order."""

    id: int
    """Rises with every fetch of one session."""
    model: Model
    pages: bytes
    steps: Steps
    """(kind, layer) in the order of need."""
    first_byte: int = 0
    """Of all steps side by side; those before it have landed already."""
    frame_bytes: int
    """Largest payload of a frame."""
    reads_arena: bool = False
    """Whether the peer copies from the worker's arena itself."""
    timeout_ms: int
    """What was left of the deadline when this was sent; clocks are not compared."""
    as_copy: bool = False
    """Whether a cache fetches copies to keep: then it is no use of the pages, and none is read from
    disk."""
    traceparent: Traceparent = ""
    """As in W3C's Trace Context, of the request that it is for; empty where that is not traced."""


class Located(msgspec.Struct, frozen=True, kw_only=True, tag="located"):
    """In place of a frame: its payload lies in the arena, and stays until there is a `Cancel`.

    Memory that was used anew meanwhile is noticed by the checksum.
    """

    frame: Frame
    places: Places
    """(start, stop) in the arena of each part of the payload."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nothing more is wanted of it, and nothing is read that was located for it; frames under way
    are ignored."""

    id: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A fetch is over."""

    id: int
    error: str
    """A value of `Why`."""
    reason: ReasonText = ""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with a Pong."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Here I am."""


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """There is no session, or no longer: greet again."""

    reason: ReasonText


ToWorker = Hello | Learned | Fetch | Cancel | Ping | Bye | verbs.ToWorker
ToPeer = Hello | Reset | Entries | Synced | Located | Ended | Pong | Bye | verbs.ToPeer


class Why(StrEnum):
    """Why a fetch ended."""

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
    """The header frame of a message; raises ProtocolError where it exceeds the cap."""
    header = with_checksum(_encoder.encode(message))
    if len(header) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(header)} bytes exceeds {MAX_MESSAGE_BYTES}"
        )
    return header


def with_checksum(body: bytes) -> bytes:
    """A header of an encoded message: the body, then its checksum."""
    return body + checksum(body).to_bytes(_CHECKSUM_BYTES, "little")


def decode_to_worker(header: memoryview) -> ToWorker:
    """What a peer said; raises ProtocolError."""
    return _decode(_to_worker, header)


def decode_to_peer(header: memoryview) -> ToPeer:
    """What a worker said; raises ProtocolError."""
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
    """The family in a Hello; raises ProtocolError where versions differ or it cannot be read."""
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
    """Raises FamilyMismatch where `who` said a Hello that `ours` cannot exchange caches with."""
    try:
        ours.require_equal(family_of(message), who=who)
    except ProtocolError as exc:
        raise FamilyMismatch(f"{who} cannot exchange caches with this server: {exc}") from exc


def ended_by(id: int, error: FetchError) -> Ended:
    why = next(why for why, kind in _ERRORS.items() if isinstance(error, kind))
    return Ended(id=id, error=why.value, reason=reason(error))


def error_of(message: Ended, who: str) -> FetchError:
    """What `who` ended a fetch by; also where a newer one has other words."""
    kinds = {why.value: kind for why, kind in _ERRORS.items()}
    return kinds.get(message.error, FetchError)(f"{who}: {said(message)}")


def reason(error: Exception) -> str:
    """An error's text, short enough for a header."""
    return printable(str(error)[:MAX_REASON_CHARS])


def said(message: Ended | Bye | verbs.Denied) -> str:
    """The reason that a worker gives."""
    return printable(message.reason)


# What messages ask for, checked before anything is done with it; all raise ProtocolError.


def pages_of(named: bytes) -> tuple[PageHash, ...]:
    """The pages that a message names."""
    try:
        return split_hashes(named)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc


def deadline_of(message: Fetch, clock: Clock) -> Deadline:
    """When it is over, by this side's clock."""
    return Deadline.after(min(max(message.timeout_ms, 0) / 1000, MAX_REQUEST_S), clock)


def steps_of(message: Fetch, num_layers: int) -> tuple[Step, ...]:
    """The steps a Fetch names: each once, and of a layer that exists."""
    steps = tuple(Step(kind, layer) for kind, layer in message.steps)
    if len(set(steps)) != len(steps):
        raise ProtocolError("a fetch names a step twice")
    for step in steps:
        if not 0 <= step.layer < num_layers:
            raise ProtocolError(f"a fetch names layer {step.layer} of {num_layers}")
    return steps
