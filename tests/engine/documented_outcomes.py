"""Outcomes that the documentation says a request can have."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/no-reuse.md"


@functools.cache
def outcomes() -> frozenset[str]:
    """Return the documented outcomes. Each has a heading of its own; a fallback has one for each
    cause."""
    return frozenset(re.findall(r"(?m)^### `(.+)`$", PAGE.read_text()))
