"""Write a profile's report: `index.html`, which contains its pictures, and the same pictures as PNG
files beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from profiles.evidence import MeasuredProfile
from profiles.report import derived, tables

TEMPLATES: Final = Environment(
    loader=PackageLoader("profiles.report", "."), autoescape=True, undefined=StrictUndefined
)


def write_page(path: Path, title: str, shown: Sequence[tables.Table]) -> None:
    """Write a page that has only tables."""
    page = TEMPLATES.get_template("tables.html.jinja").render(title=title, tables=shown)
    path.write_text(page, encoding="utf-8")


def write_report(profile: MeasuredProfile, folder: Path) -> list[Path]:
    """Write `index.html`, which contains its pictures, and the same pictures as PNG files.

    Makes the folder and replaces files of an earlier report. Returns the written paths, the page
    first.
    """
    # Imported here because matplotlib is slow to import, and tables do not need it.
    from profiles.report.pictures import PICTURES

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {it: folder / f"{it.name}.png" for it in PICTURES}
    for picture, path in drawn.items():
        picture.save(profile, path)
    page = TEMPLATES.get_template("page.html.jinja").render(
        profile=profile,
        next_steps=derived.next_steps(profile),
        summary=tables.summary(profile),
        measured=(tables.frontier(profile), tables.tasks(profile), tables.baselines(profile)),
        pictures=[(it, base64.b64encode(drawn[it].read_bytes()).decode()) for it in PICTURES],
        made=(tables.identities(profile), tables.data(profile), tables.making(profile)),
    )
    index = folder / "index.html"
    index.write_text(page, encoding="utf-8")
    return [index, *drawn.values()]
