"""A profile for people: one HTML page that opens without a network, and its pictures.

profile -> derived -> findings -> pictures -> page
"""

from __future__ import annotations

from pathlib import Path

from cachetree.evidence import MeasuredProfile

__all__ = ["write_report"]


def write_report(profile: MeasuredProfile, folder: Path) -> list[Path]:
    """Write `index.html`, which carries its pictures, and the same pictures beside it as PNGs.

    Makes the folder; files of an earlier report are replaced. Returns what was written, the page
    first.
    """
    # Here and not above: matplotlib is slow to import, and the words are wanted without it.
    from profiles.report.files import write_files

    return write_files(profile, folder)
