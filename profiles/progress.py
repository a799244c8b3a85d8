"""Show how far a run is and when it will be done: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn

from profiles.report.words import duration

LINE_EVERY_S: Final = 10.0
FORECAST_WEIGHT: Final = 0.1
"""Share of all work that counts as already done at the forecast speed. The first steps differ from
later ones: on a run of 120 contexts, the observed speed without this share was wrong by up to 51 %.
With it, the expected length of each long stage was wrong by at most 14 % at any point."""


@contextlib.contextmanager
def shown(
    console: Console, title: str, total_s: float, found_s: float = 0.0
) -> Iterator[Callable[[float], None]]:
    """Yield a function to call when a step is done, with the step's forecast in seconds. The
    forecasts add up to `total_s`. An earlier run did `found_s` of these seconds."""
    begun_s = said_s = time.monotonic()
    columns = (
        *(TextColumn("{task.description:<10}"), BarColumn(40), TaskProgressColumn()),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=total_s, completed=found_s, left="")
        (task,) = bar.tasks

        def advance(forecast_s: float) -> None:
            nonlocal said_s
            bar.advance(task.id, forecast_s)
            left = f"{duration(left_s(task, found_s))} left"
            bar.update(task.id, left=left)
            is_late = time.monotonic() - said_s >= LINE_EVERY_S
            if total_s and is_late and not console.is_terminal:
                said_s = time.monotonic()
                console.print(f"{title}: {task.percentage:.0f}%, {left}", highlight=False)

        advance(0.0)
        yield advance
        bar.update(task.id, completed=total_s, left="done")
    if not console.is_terminal:
        console.print(f"{title}: done in {duration(time.monotonic() - begun_s)}", highlight=False)


def left_s(task: Task, found_s: float) -> float:
    """Return the seconds left: the forecast, corrected by its error so far."""
    rest_s = max(0.0, task.total - task.completed)
    weight_s = FORECAST_WEIGHT * (task.total - found_s)
    done_s = task.completed - found_s
    return rest_s and rest_s * (task.elapsed + weight_s) / (done_s + weight_s)
