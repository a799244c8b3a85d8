"""Says what is going on: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[], None]


class Steps:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    @contextlib.contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Of `total` parts, after each of which the value is called, or of unknown length."""
        begun_s, columns = time.monotonic(), [TextColumn("{task.description:<34}"), BarColumn(30)]
        if total is not None:
            columns.append(MofNCompleteColumn())
        columns.append(TimeElapsedColumn())
        is_quiet = not self._console.is_terminal
        if is_quiet:
            self.say(f"{title} ...")
        with Progress(*columns, console=self._console, disable=is_quiet) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
            bar.update(task, total=total or 1, completed=total or 1)
        if is_quiet:
            self.say(f"{title}: done in {time.monotonic() - begun_s:.1f} s")
