"""What the documentation says that a request can be told of itself."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/responses.md"


@functools.cache
def outcomes() -> frozenset[str]:
    """Those of the table with each cause of a fallback that it names, and `reused`."""
    table = PAGE.read_text().split("\nOutcomes other than `reused`:\n")[1].strip().split("\n\n")[0]
    found = {"reused"}
    for line in table.splitlines():
        cell, text = line.strip("|").split("|")[:2]
        names = re.findall(r"`([^`]+)`", cell)
        if names == ["fallback: CAUSE"]:
            causes = re.findall(r"`([A-Z]\w+)`", text)
            names = [f"fallback: {cause}" for cause in causes]
        found.update(names)
    return frozenset(found)
