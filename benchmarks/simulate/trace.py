"""The form of a trace: JSON lines, of which the first says what the others are.

    {"trace":"cachetree","version":1,"family":{"architecture":"LlamaForCausalLM",...}}
    {"at_s":0.25,"model":"planner","prompt":[["doc-17",8000],["q-991",120]]}

A prompt is a row of segments (name, tokens). Segments of one name begin with the same tokens,
whatever their lengths, and share none with segments of another name. A LoRA adapter is a model of
its own, named like "base+adapter". No text is kept, so a trace is small and tells nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from cachetree.checkpoint import Family
from cachetree.errors import UNREADABLE, ConfigError
from cachetree.ids import PAGE_HASH_BYTES, PageHash

_MAX_LINE_BYTES: Final = 1 << 20
_MAX_REQUESTS: Final = 1_000_000
_MAX_PROMPT_TOKENS: Final = 1 << 21

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Segment = tuple[Name, Annotated[int, Meta(ge=1, le=_MAX_PROMPT_TOKENS)]]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    trace: Literal["cachetree"] = "cachetree"
    version: Literal[1] = 1
    family: Family
    """Its sizes say what a token takes, in bytes and in seconds."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every other line."""

    at_s: Annotated[float, Meta(ge=0)]
    """Since the trace began; in order."""
    model: Name
    prompt: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=1024)]

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All of it, in memory."""

    header: Header
    requests: Sequence[Request]


def read_trace(path: Path) -> Trace:
    """Raises ConfigError naming the file, the line and the field."""
    header: Header | None = None
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                where = f"trace {path} line {number}"
                if len(line) > _MAX_LINE_BYTES:
                    raise ConfigError(f"{where} is longer than {_MAX_LINE_BYTES} bytes")
                try:
                    if header is None:
                        header = _HEADER.decode(line)
                        continue
                    request = _REQUEST.decode(line)
                except UNREADABLE as exc:
                    raise ConfigError(f"{where}: {exc}") from exc
                _check(request, requests[-1] if requests else None, where)
                requests.append(request)
                if len(requests) > _MAX_REQUESTS:
                    raise ConfigError(f"{where}: more than {_MAX_REQUESTS} requests")
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read: {exc.strerror}") from exc
    if header is None or not requests:
        raise ConfigError(f"trace {path} has no requests; it needs a header and one a line")
    return Trace(header=header, requests=requests)


def _check(request: Request, before: Request | None, where: str) -> None:
    if request.num_tokens > _MAX_PROMPT_TOKENS:
        raise ConfigError(f"{where}: the prompt has more than {_MAX_PROMPT_TOKENS} tokens")
    if before is not None and request.at_s < before.at_s:
        raise ConfigError(
            f"{where}: at_s is {request.at_s}, before the {before.at_s} of the line above; "
            "sort the trace by it"
        )


def write_trace(trace: Trace, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    lines: Iterable[Header | Request] = (trace.header, *trace.requests)
    try:
        path.write_bytes(b"".join(_ENCODER.encode(line) + b"\n" for line in lines))
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be written: {exc.strerror}") from exc


class PageNames:
    """Page hashes of prompts, by what the segments say of the tokens in each page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: dict[tuple[Segment, ...], list[PageHash]] = {}

    def of(self, prompt: tuple[Segment, ...]) -> list[PageHash]:
        """The keys of its whole pages; a last one that is not full has none."""
        pages = self._known.get(prompt)
        if pages is None:
            pages = self._known[prompt] = list(self._name(prompt))
        return pages

    def _name(self, prompt: tuple[Segment, ...]) -> Iterable[PageHash]:
        size, digest = self._page_size, b""
        parts: list[str] = []
        room = size
        for name, num_tokens in prompt:
            start = 0
            while start < num_tokens:
                stop = min(num_tokens, start + room)
                parts.append(f"{len(name)}:{name}:{start}:{stop}:")
                room -= stop - start
                start = stop
                if not room:
                    text = digest + "".join(parts).encode()
                    digest = hashlib.sha256(text).digest()
                    yield PageHash(digest[:PAGE_HASH_BYTES])
                    parts, room = [], size


_HEADER: Final = msgspec.json.Decoder(Header)
_REQUEST: Final = msgspec.json.Decoder(Request)
_ENCODER: Final = msgspec.json.Encoder()
