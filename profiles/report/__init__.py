"""A profile for people: one HTML page that opens without a network, and its pictures.

profile -> derived -> findings -> pictures -> page

Several profiles: one table and one picture of what each kind of plan keeps and costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cachetree.evidence import MeasuredProfile

__all__ = ["write_comparison", "write_report"]


def write_report(profile: MeasuredProfile, folder: Path) -> list[Path]:
    """Write `index.html`, which carries its pictures, and the same pictures beside it as PNGs.

    Makes the folder; files of an earlier report are replaced. Returns what was written, the page
    first.
    """
    # Here and not above: matplotlib is slow to import, and the words are wanted without it.
    from profiles.report.files import write_files

    return write_files(profile, folder)


def write_comparison(profiles: Mapping[str, MeasuredProfile], folder: Path) -> list[Path]:
    """Write `plans.md` and `plans.png` about several profiles, by a name for people.

    Makes the folder; returns what was written.
    """
    from profiles.report import plans, style
    from profiles.report.plan_picture import draw_plans

    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / "plans.md", folder / "plans.png"
    table.write_text(plans.markdown(profiles), encoding="utf-8")
    style.save(draw_plans(profiles), picture)
    return [table, picture]
