"""The directory of one store: whose it is, and that only one process writes it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.errors import UNREADABLE, ConfigError

FORMAT: Final = 5
"""Of everything in the directory; a release that changes any of it counts up."""

TEMPORARY: Final = ".new"
"""Ends the name of a file that is being written."""

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

log = logging.getLogger(__name__)

_MANIFEST: Final = "manifest.json"
_LOCK: Final = "lock"
_OWN_FILES: Final = (_LOCK, _MANIFEST + TEMPORARY)
_DIGITS: Final = 12
_REMEDY: Final = "name another directory, or remove this one"


@cache
def family_digest(family: Family) -> bytes:
    """16 bytes."""
    return hashlib.sha256(msgspec.json.encode(family)).digest()[:16]


class _Version(msgspec.Struct, frozen=True):
    """Read before the rest, which another version may have written differently."""

    format: int


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    family: Family


class Directory:
    """Held by this process until `close`. Raises ConfigError where it is not ours to write."""

    def __init__(self, path: Path, family: Family) -> None:
        self.path: Final = path
        # So that an entry of another family that somebody puts here is none of ours.
        self._prefix: Final = f"entry-{family_digest(family)[:4].hex()}-"
        try:
            for folder in [it for it in (*reversed(path.parents), path) if not it.exists()]:
                folder.mkdir(FOLDER_MODE, exist_ok=True)
            self._lock = _lock(path)
        except OSError as exc:
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {_REMEDY}") from exc
        try:
            self._check_manifest(family)
            self._tighten()
            self.num_bytes: Final = sum((path / it).stat().st_size for it in (_MANIFEST, _LOCK))
        except OSError as exc:
            self.close()
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {_REMEDY}") from exc
        except ConfigError:
            self.close()
            raise

    def path_of(self, number: int) -> Path:
        return self.path / f"{self._prefix}{number:0{_DIGITS}d}"

    def entries(self) -> list[tuple[int, str]]:
        """Number and path of those that are there, in the order in which they were written."""
        return sorted((int(path[-_DIGITS:]), path) for path in self._own(""))

    def sweep(self) -> int:
        """Delete what processes that died had begun to write; how many files those were."""
        begun = self._own(TEMPORARY)
        for path in begun:
            Path(path).unlink()
        return len(begun)

    def _own(self, ending: str) -> list[str]:
        name = re.compile(rf"{self._prefix}\d{{{_DIGITS}}}{re.escape(ending)}")
        with os.scandir(self.path) as there:
            return [it.path for it in there if name.fullmatch(it.name) and it.is_file()]

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _tighten(self) -> None:
        """Prompts can be read out of KV: what others may read of ours they may not any more."""
        if self.path.stat().st_mode & 0o077:
            for file in filter(Path.is_file, self.path.iterdir()):
                file.chmod(FILE_MODE)
            self.path.chmod(FOLDER_MODE)
            log.info("%s could be read by others; now only by this user", self.path)

    def _check_manifest(self, family: Family) -> None:
        path = self.path / _MANIFEST
        if path.exists():
            self._check(path, path.read_bytes(), family)
            return
        others = [it.name for it in self.path.iterdir() if it.name not in _OWN_FILES]
        if others:
            raise ConfigError(
                f"disk path is {str(self.path)!r}, which has no {_MANIFEST} but other files "
                f"({min(others)}); name an empty directory"
            )
        made = _Manifest(format=FORMAT, family=family)
        with new_file(path, is_synced=True) as handle:
            os.write(handle, msgspec.json.format(msgspec.json.encode(made)))

    @staticmethod
    def _check(path: Path, text: bytes, family: Family) -> None:
        try:
            version = msgspec.json.decode(text, type=_Version).format
            if version != FORMAT:
                raise ConfigError(
                    f"{path} is of another release: format is {version} there and {FORMAT} here; "
                    f"{_REMEDY}"
                )
            manifest = msgspec.json.decode(text, type=_Manifest)
        except UNREADABLE as exc:
            raise ConfigError(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
        if difference := family.difference(manifest.family):
            raise ConfigError(f"{path} is of another family: {difference}; {_REMEDY}")


@contextlib.contextmanager
def new_file(path: Path, *, is_synced: bool) -> Iterator[int]:
    """A handle to write a file that comes to its name at the end of the block, whole.

    It is gone where the block raises; while it is written its name ends in `TEMPORARY`. With
    `is_synced` it has reached the device when it has its name. Raises OSError.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    handle = os.open(temporary, flags, FILE_MODE)
    try:
        yield handle
        if is_synced:
            os.fsync(handle)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    if is_synced:
        _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flush the names of the files to the device."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
