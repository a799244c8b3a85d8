"""The tables that pages have of results, by name. `python -m tools.reference` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from tools.tables import bench, quality, study
from tools.tables.cells import read, table, where

__all__ = ["PARTS", "made", "shown", "table"]

PARTS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    **bench.PARTS,
    **quality.PARTS,
    **study.PARTS,
}
"""The result that each is made of, and how."""


def made(name: str) -> str:
    """Of the result that is kept, and what that was measured on; or that there is none."""
    result, part = PARTS[name]
    try:
        found = read(result)
    except FileNotFoundError:
        return f"There is no result yet: `make bench` writes `results/{result}.json`.\n"
    on = where(found) if isinstance(found, dict) else ""
    return f"{part(found)}\n{on}.\n" if on else part(found)


def shown(result: str, found: Any) -> Iterator[str]:
    """Every table of a result that was just found."""
    for of, part in PARTS.values():
        if of == result:
            yield part(found)
