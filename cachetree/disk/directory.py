"""The directory of one store: whose it is, and that only one process writes it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.errors import UNREADABLE, ConfigError

FORMAT: Final = 2
"""Of everything in the directory; a release that changes any of it counts up."""

MARKER_BYTES: Final = 16

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

log = logging.getLogger(__name__)

_MANIFEST: Final = "manifest.json"
_LOCK: Final = "lock"
_SEGMENT: Final = "segment-{:08d}"
_OWN_FILES: Final = (_LOCK, f"{_MANIFEST}.new")
_REMEDY: Final = "name another directory, or remove this one"


class _Version(msgspec.Struct, frozen=True):
    """Read before the rest, which another version may have written differently."""

    format: int


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    marker: str
    """Hex; begins every record, so that the next one is found after a damaged one."""
    family: Family


class Directory:
    """Held by this process until `close`. Raises ConfigError where it is not ours to write."""

    def __init__(self, path: Path, family: Family) -> None:
        self.path: Final = path
        try:
            for folder in [it for it in (*reversed(path.parents), path) if not it.exists()]:
                folder.mkdir(FOLDER_MODE, exist_ok=True)
            self._lock = _lock(path)
        except OSError as exc:
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {_REMEDY}") from exc
        try:
            manifest = self._manifest(family)
            self._tighten()
            self.num_bytes: Final = sum((path / it).stat().st_size for it in (_MANIFEST, _LOCK))
        except OSError as exc:
            self.close()
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {_REMEDY}") from exc
        except ConfigError:
            self.close()
            raise
        self.marker: Final = bytes.fromhex(manifest.marker)

    def segment_path(self, number: int) -> Path:
        return self.path / _SEGMENT.format(number)

    def segment_numbers(self) -> list[int]:
        """The segments that are there, in the order in which they were begun."""
        names = [it.name for it in self.path.glob("segment-*")]
        numbers = [int(name[8:]) for name in names if name[8:].isdecimal()]
        return sorted(number for number in numbers if _SEGMENT.format(number) in names)

    def sync(self) -> None:
        """Flush the names of the files to the device."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _tighten(self) -> None:
        """Prompts can be read out of KV: what others may read of ours they may not any more."""
        wide = [it for it in self.path.iterdir() if it.stat().st_mode & 0o077]
        for file in wide:
            file.chmod(FILE_MODE)
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(FOLDER_MODE)
            log.info("%s could be read by others; now only by this user", self.path)

    def _manifest(self, family: Family) -> _Manifest:
        path = self.path / _MANIFEST
        if not path.exists():
            others = [it.name for it in self.path.iterdir() if it.name not in _OWN_FILES]
            if others:
                raise ConfigError(
                    f"disk path is {str(self.path)!r}, which has no {_MANIFEST} but other files "
                    f"({min(others)}); name an empty directory"
                )
            marker = secrets.token_hex(MARKER_BYTES)
            made = _Manifest(format=FORMAT, marker=marker, family=family)
            self._write(path, msgspec.json.format(msgspec.json.encode(made)))
            return made
        return self._checked(path, path.read_bytes(), family)

    def _checked(self, path: Path, text: bytes, family: Family) -> _Manifest:
        try:
            version = msgspec.json.decode(text, type=_Version).format
            if version != FORMAT:
                raise ConfigError(
                    f"{path} is of another release: format is {version} there and {FORMAT} here; "
                    f"{_REMEDY}"
                )
            manifest = msgspec.json.decode(text, type=_Manifest)
            if len(bytes.fromhex(manifest.marker)) != MARKER_BYTES:
                raise ValueError(f"marker has {len(manifest.marker)} digits")
        except UNREADABLE as exc:
            raise ConfigError(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
        for field in family.__struct_fields__:
            theirs, ours = getattr(manifest.family, field), getattr(family, field)
            if theirs != ours:
                raise ConfigError(
                    f"{path} is of another family: {field} is {theirs!r} there and {ours!r} "
                    f"here; {_REMEDY}"
                )
        return manifest

    def _write(self, path: Path, text: bytes) -> None:
        """Whole or not at all, also after a power cut."""
        new = path.with_name(f"{path.name}.new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        self.sync()


def _lock(path: Path) -> int:
    """A handle that keeps others out while it is open."""
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"disk path is {str(path)!r}, which process {owner or 'unknown'} is using; "
            "give each process a directory of its own"
        ) from None
    except OSError:
        os.close(handle)
        raise
    with contextlib.suppress(OSError):  # Only for the message above; the disk may be full.
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid():<16}\n".encode(), 0)
    return handle
