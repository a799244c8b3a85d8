"""Says what is going on: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0

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
    def waiting(self, title: str) -> Iterator[Callable[[float], None]]:
        """A step of unknown length; call the value now and then with the seconds waited."""
        with self._running(title, None) as advance:
            yield lambda _seconds: advance()

    @contextlib.contextmanager
    def counted(self, title: str, total: int) -> Iterator[Advance]:
        """A step of `total` parts; call the value after each."""
        with self._running(title, total) as advance:
            yield advance

    def _running(self, title: str, total: int | None) -> contextlib.AbstractContextManager[Advance]:
        return self._bar(title, total) if self._console.is_terminal else self._lines(title, total)

    @contextlib.contextmanager
    def _bar(self, title: str, total: int | None) -> Iterator[Advance]:
        columns = [TextColumn("{task.description:<34}"), BarColumn(30)]
        if total is not None:
            columns.append(MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task, 0 if total is None else 1)
            progress.update(task, total=total or 1, completed=total or 1)

    @contextlib.contextmanager
    def _lines(self, title: str, total: int | None) -> Iterator[Advance]:
        begun_s = said_s = time.monotonic()
        num_done = 0
        self.say(f"{title} ...")

        def advance() -> None:
            nonlocal num_done, said_s
            num_done += 1
            now_s = time.monotonic()
            if now_s - said_s >= LINE_EVERY_S:
                said_s = now_s
                done = "" if total is None else f" {num_done}/{total},"
                self.say(f"{title}:{done} {now_s - begun_s:.0f} s")

        yield advance
        self.say(f"{title}: done in {time.monotonic() - begun_s:.1f} s")
