"""Replace the content of a user's file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a place to write to, which becomes the file's content at the end of the block.

    A reader sees the old content or the new one, whole. A link stays a link, and its target gets
    the content. A device or pipe is written itself. Raises OSError.
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
