"""Says how far a run is and when it will be done: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from profiles.report.words import duration

LINE_EVERY_S: Final = 10.0
SETTLED_SHARE: Final = 0.02
"""Of the work; before that the forecast alone says how long it will take."""

Done = Callable[[float, bool], None]
"""Told of every step: its forecast in seconds, and whether it took place just now."""


class Clock:
    """What is left: the forecast, corrected by how it has done so far."""

    def __init__(self, total_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._total_s, self._now = total_s, now
        self._begun_s = now()
        self._skipped_s = self._done_s = 0.0

    def done(self, forecast_s: float, is_new: bool) -> None:
        """A step is done: just now, or by an earlier run."""
        if is_new:
            self._done_s += forecast_s
        else:
            self._skipped_s += forecast_s

    @property
    def share(self) -> float:
        """Of all work that is done, at most 1."""
        return min(1.0, (self._skipped_s + self._done_s) / self._total_s) if self._total_s else 1.0

    @property
    def left_s(self) -> float:
        elapsed_s = self._now() - self._begun_s
        left = max(0.0, self._total_s - self._skipped_s - self._done_s)
        if self._done_s <= SETTLED_SHARE * self._total_s:
            return left
        return left * elapsed_s / self._done_s


@contextlib.contextmanager
def shown(console: Console, title: str, clock: Clock) -> Iterator[Done]:
    """Shows a clock, which the value advances."""
    columns = [
        TextColumn("{task.description:<10}"),
        BarColumn(40),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
    ]
    begun_s = said_s = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, left=f"{duration(clock.left_s)} left")

        def done(forecast_s: float, is_new: bool) -> None:
            nonlocal said_s
            clock.done(forecast_s, is_new)
            left = f"{duration(clock.left_s)} left"
            bar.update(task, completed=clock.share, left=left)
            if not console.is_terminal and time.monotonic() - said_s >= LINE_EVERY_S:
                said_s = time.monotonic()
                console.print(f"{title}: {clock.share:.0%}, {left}", highlight=False)

        yield done
        bar.update(task, completed=1.0, left="done")
    if not console.is_terminal:
        console.print(f"{title}: done in {duration(time.monotonic() - begun_s)}", highlight=False)
