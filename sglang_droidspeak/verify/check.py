"""One line of `doctor` and `verify`."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what came of it."""

    name: str
    ok: bool
    found: str
    """What came; where that is wrong, what was expected too."""
    remedy: str = ""
    """Said where it is wrong."""


def line(it: Check) -> str:
    """For a person."""
    remedy = f"; {it.remedy}" if it.remedy and not it.ok else ""
    return f"{'ok   ' if it.ok else 'WRONG'} {it.name}: {it.found}{remedy}"
