"""Replacement of a user's file, and locks on files."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cachetree.errors import ConfigError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes the file's content at the end of the block.

    A reader sees the old content or the new one, whole. A link stays a link, and its target gets
    the content. A device or pipe is written directly. Raises OSError.
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
    """Keep other processes out of `work` while `file` is open.

    Raises ConfigError if another process does the work already.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{work} already runs in another process, which has locked {file.name}; "
            "wait for it, or name another --out"
        ) from None
