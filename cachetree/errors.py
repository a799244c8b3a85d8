"""All errors that cachetree raises.

    CacheTreeError
    ├── ConfigError            a value given by the user is wrong; names the remedy
    ├── FamilyMismatch         two models (or servers) cannot exchange caches; names the field
    ├── AuthenticationError    the keys of two servers do not agree; names possible causes
    ├── ProfileError           a pair profile cannot be read or does not fit the models
    ├── PinRefused             a pin would keep more of the budget than pins may
    ├── OrderDenied            a worker refused or failed an operator's command
    └── FetchError             a fetch ended early; its request does a full prefill
        ├── DeadlineExceeded
        ├── Cancelled
        ├── StaleEntry         pages have left the memory, disk or peer that had them
        └── ProtocolError      a peer sent something that the protocol does not allow

A miss is not an error: `match` returns no entry, `lease` and `reserve` return None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

UNREADABLE: Final = (ValueError, RecursionError)
"""Errors that decoders raise for a malformed file: for a wrong form (all errors of msgspec), text
that is not UTF-8, impossible dates, and nesting that is too deep."""


class CacheTreeError(Exception):
    """Base class of all errors of this package."""


class ConfigError(CacheTreeError):
    """A configured value is wrong. The message names the field, the value and the remedy."""


class FamilyMismatch(CacheTreeError):
    """Two models or servers differ in a field that decides whether they can exchange caches."""


class AuthenticationError(CacheTreeError):
    """Two servers could not prove their keys to each other."""


class ProfileError(CacheTreeError):
    """A pair profile cannot be used. The message names the file and the field."""


class PinRefused(CacheTreeError):
    """A pin would exceed the share of the budget for pins. The message has both numbers."""


class OrderDenied(CacheTreeError):
    """A worker did not carry out an operator's command. The message has cause and remedy."""


class FetchError(CacheTreeError):
    """A fetch ended before all of its layers arrived."""


class DeadlineExceeded(FetchError):
    """A wait reached its deadline."""


class Cancelled(FetchError):
    """The caller that started the fetch gave it up."""


class StaleEntry(FetchError):
    """Pages have left the memory, disk or peer that had them, or their lease has ended."""


class ProtocolError(FetchError):
    """A peer broke the protocol: unknown message, wrong size, wrong checksum, too large."""


_Error = TypeVar("_Error", bound=CacheTreeError)


def without_frames(error: _Error) -> _Error:
    """Return the error without its traceback. Use it before an error is stored: the frames of a
    traceback would keep alive the buffers that they use."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def printable(text: str) -> str:
    """Return a text from another server on one line, without control characters for a terminal."""
    return "".join(it if it.isprintable() else " " for it in text)


def written(path: Path) -> str:
    """Return a path as messages show it: as the user wrote it. For a relative path, also name the
    folder that it starts from."""
    return str(path) if path.is_absolute() else f"{path} (relative to {Path.cwd()})"
