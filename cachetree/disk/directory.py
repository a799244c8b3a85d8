"""The directory of one disk store: its family and format, and a lock so that only one process
writes there."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from cachetree.checkpoint import Family
from cachetree.errors import ConfigError

FORMAT: Final = 8
"""Version of the format of all files in the directory. Each change of the format adds 1."""

TEMPORARY: Final = ".new"
"""Suffix of a file that is being written."""

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

MEND: Final = "mend that, or name another directory"
"""Remedy in messages about an operation that the system refused. It does not advise to delete
files, because they may be intact."""

log = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 64 << 10
"""Size in bytes of the buffer that writes a file. Larger pieces bypass the buffer."""
_LOCK: Final = "cachetree.lock"
_KEY: Final = "[0-9a-f]{32}"
_ENTRY: Final = "entry-.+-[0-9a-f]{12,32}"
"""Pattern of the names of entries, of any family and release."""


class Directory:
    """A directory that this process locks until `close`. Raises ConfigError if it may not write
    there."""

    def __init__(self, path: Path, family: Family | None) -> None:
        """Open the directory of a family. Without a family, any family's directory is accepted."""
        self.path: Final = path
        self._prefix: Final = f"entry-{FORMAT}-" + (f"{family.digest[:8]}-" if family else "")
        self._lock = -1
        try:
            for folder in [it for it in (*reversed(path.parents), path) if not it.exists()]:
                folder.mkdir(FOLDER_MODE, exist_ok=True)
            if (owner := path.stat().st_uid) != os.geteuid():
                raise ConfigError(
                    f"disk path is {str(path)!r}, which is of user {owner}, and this is user "
                    f"{os.geteuid()}; name a directory of this user"
                )
            if not (path / _LOCK).exists():
                self._check()  # Before the lock file marks the directory as ours.
            self._lock = _lock(path)
            self._check()
            self.num_bytes: Final = (path / _LOCK).stat().st_size
        except OSError as exc:
            self.close()
            raise ConfigError(f"disk path is {str(path)!r}: {exc}; {MEND}") from exc
        except ConfigError:
            self.close()
            raise

    def path_of(self, key: str) -> Path:
        return self.path / f"{self._prefix}{key}"

    def entries(self) -> list[str]:
        """Paths of all entries in the directory."""
        return self._files(self._prefix + _KEY)

    def sweep(self) -> int:
        """Delete the unfinished files of processes that have died. Return the number of deleted
        files."""
        begun = self._files(_ENTRY + re.escape(TEMPORARY))
        for path in begun:
            Path(path).unlink()
        return len(begun)

    def _files(self, pattern: str) -> list[str]:
        """Return the paths of all files with names that match `pattern`."""
        name = re.compile(pattern)
        with os.scandir(self.path) as entries:
            return [
                it.path
                for it in entries
                if name.fullmatch(it.name) and it.is_file(follow_symlinks=False)
            ]

    def close(self) -> None:
        """Release the directory for other processes. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def tighten(self) -> None:
        """Remove other users' access to our files: prompts can be reconstructed from KV."""
        if self.path.stat().st_mode & 0o077:
            for file in self._files(".*"):
                Path(file).chmod(FILE_MODE)
            self.path.chmod(FOLDER_MODE)
            log.info("%s could be read by others; now only by this user", self.path)

    def _check(self) -> None:
        theirs = self._files(rf"(?!{self._prefix}){_ENTRY}")
        if theirs:
            raise ConfigError(
                f"disk path is {str(self.path)!r}, which holds {Path(min(theirs)).name} of another "
                f"family or release, where ours begin with {self._prefix}; name another "
                "directory, or remove this one"
            )
        if not (self.path / _LOCK).exists() and (others := list(self.path.iterdir())):
            raise ConfigError(
                f"disk path is {str(self.path)!r}, which has no {_LOCK} but other files "
                f"({min(others).name}); name an empty directory"
            )


def try_directory(path: Path) -> None:
    """Check that this process could use a directory, without changing anything.

    Raises ConfigError, like `Directory`.
    """
    made = [it for it in (path, *path.parents) if not it.exists()]
    has_lock = (path / _LOCK).exists()
    try:
        with contextlib.closing(Directory(path, None)):
            if not has_lock:
                (path / _LOCK).unlink()
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file within a `with` block. At the end of the block, the complete file gets its name.

    If the block raises, the file is deleted. Until the end of the block, the file's name ends in
    `TEMPORARY`. A power cut may lose or damage a file that the kernel has not yet written to the
    disk. Raises OSError.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, flags, FILE_MODE)
    try:
        with os.fdopen(handle, "wb", _BUFFER_BYTES) as file:
            yield file
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def lock_file(path: Path) -> int:
    """Open a file of this user; make the file if it is missing. While it is open, it is locked for
    other processes. Raises BlockingIOError if another process has the lock, and OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, FILE_MODE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(path: Path) -> int:
    try:
        handle = lock_file(path / _LOCK)
    except BlockingIOError:
        owner = (path / _LOCK).read_bytes()[:32].decode(errors="replace").strip()
        raise ConfigError(
            f"disk path is {str(path)!r}, which process {owner or 'unknown'} is using; "
            "give each process a directory of its own"
        ) from None
    with contextlib.suppress(OSError):  # Only for the message above; the disk may be full.
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid():<16}\n".encode(), 0)
    return handle
