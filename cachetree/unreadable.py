"""Files that are not what they should be: what decoders raise, and which file it is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

UNREADABLE: Final = (ValueError, RecursionError)
"""Another form (all errors of msgspec), text that is not UTF-8, dates that do not exist; nesting
too deep, also in a field that nobody knows and that is skipped."""


def written(path: Path) -> str:
    """A path as its user wrote it, and where that is looked for."""
    return str(path) if path.is_absolute() else f"{path} (relative to {Path.cwd()})"
