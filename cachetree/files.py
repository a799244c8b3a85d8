"""Replace a user's file in one step, and lock a file against other processes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cachetree.errors import ConfigError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file in one step. Yield the path of a temporary file, which replaces `path` at the
    end of the block.

    Readers see the whole old content or the whole new one. A symbolic link stays, and its target is
    replaced. A device or pipe is written directly. Raises OSError.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.tmp")
    try:
        yield fresh
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def claim(file: BinaryIO, work: str) -> None:
    """Lock `file` against other processes until it is closed. Raises ConfigError if another process
    has the lock; `work` is what the caller is about to do, for this error."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{work} already runs in another process, which has locked {file.name}; "
            "wait for it, or name another --out"
        ) from None
