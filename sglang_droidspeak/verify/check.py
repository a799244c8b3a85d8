"""Result of one check by `droidspeak doctor` or `droidspeak verify`, as a line."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check, with a remedy."""

    name: str
    ok: bool
    found: str
    """Text of the result. A wrong result also says what was expected."""
    remedy: str = ""
    """Remedy, shown if the result is wrong."""


def line(check: Check) -> str:
    """Return the result as one line for a person."""
    remedy = f"; {check.remedy}" if check.remedy and not check.ok else ""
    return f"{'ok   ' if check.ok else 'WRONG'} {check.name}: {check.found}{remedy}"
