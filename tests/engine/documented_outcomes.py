"""What the documentation says that a request can be told of itself."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/no-reuse.md"


@functools.cache
def outcomes() -> frozenset[str]:
    """Each has a heading of its own; a fallback has one for each cause."""
    return frozenset(re.findall(r"(?m)^### `(.+)`$", PAGE.read_text()))
