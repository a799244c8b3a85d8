"""A profile in a terminal: the verdict, and the tables behind it."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from profiles.evidence import MeasuredProfile
from profiles.report import derived, tables

_DIGEST_CHARACTERS: Final = 16


def table_of(profile: MeasuredProfile) -> RenderableType:
    """Show verdict, frontier, baselines, both models and how the profile was made, in 80 columns or
    more."""
    verdict, colour = ("passed", "green") if profile.passed else ("failed", "red")
    shown = (
        tables.summary(profile),
        tables.frontier(profile).without("KL", "moved", "of full"),
        tables.tasks(profile).without("metric", "questions", "sender"),
        tables.baselines(profile).without("runs", "KL"),
        tables.identities(profile, _DIGEST_CHARACTERS),
        tables.data(profile, _DIGEST_CHARACTERS),
        tables.making(profile),
    )
    said = Text.assemble((verdict, f"bold {colour}"), f": {profile.reason}\n")
    said.append(f"pair: {profile.pair}\n")
    for step in derived.next_steps(profile):
        said.append(f"next: {step}\n")
    return Group(said, *map(drawn, shown))


def drawn(table: tables.Table) -> RenderableType:
    """Draw a table. Text appears as it is, with its brackets: no part of it is read as markup."""
    drawn = Table(
        title=Text(table.title) if table.title else None,
        title_justify="left",
        caption=Text(table.caption) if table.caption else None,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, int(table.is_prose), 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=any(table.headers),
    )
    for place, header in enumerate(table.headers):
        is_number = place > 0 and not table.is_prose
        drawn.add_column(
            Text(header),
            justify="right" if is_number else "left",
            overflow="fold",
        )
    for place, row in enumerate(table.rows):
        marked = place in table.marked
        first = f"{'* ' if marked else '  '}{row[0]}" if table.marked else row[0]
        cells = [Text(cell) for cell in (first, *row[1:])]
        drawn.add_row(*cells, style="bold" if marked and not table.is_prose else None)
    return Padding(drawn, (0, 0, 1, 0))
