"""The demo from its configuration to its report."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from profiles.data.documents import Document
from profiles.environment import read_environment
from sglang_droidspeak.demo.config import DemoConfig
from sglang_droidspeak.demo.report import DemoReport, MeasuredPair, draw, table_of, write_json
from sglang_droidspeak.demo.results import (
    Condition,
    equality_failures,
    measured_of,
    quality_failures,
    reuse_failures,
)
from sglang_droidspeak.demo.rig import Advance, DemoFailed, Subject, random_documents, started

PACKAGES = ("sglang-droidspeak", "sglang", "torch", "transformers")


def run_demo(config: DemoConfig, console: Console) -> DemoReport:
    """Measure, report, and write `demo.json`, `demo.png` and the servers' logs.

    Raises DemoFailed where something did not work or a check does not hold; what was measured is
    written and shown before that.
    """
    steps = Steps(console)
    environment = read_environment(PACKAGES)
    subject, profile = config.pair()
    documents = config.documents(profile)
    (config.out / "logs").mkdir(parents=True, exist_ok=True)
    if config.instead:
        steps.say(config.instead)

    pair, failures = _ask(config, subject, documents, steps)
    ceiling = None
    if config.times_random_pair:
        with tempfile.TemporaryDirectory(prefix="droidspeak-demo-") as folder:
            with steps.step("Write two models of random weights"):
                random = config.make_random(Path(folder))
            ceiling, more = _ask(config, random, random_documents(), steps)
        failures += more

    report = DemoReport(
        pair=pair,
        ceiling=ceiling,
        failures=[*failures, *quality_failures(pair.conditions, profile)],
        elapsed_s=round(steps.elapsed_s, 1),
        environment=environment,
    )
    write_json(report, config.out / "demo.json")
    draw(report, config.out / "demo.png")
    console.print(table_of(report))
    steps.say(
        f"{config.out / 'demo.json'}, {config.out / 'demo.png'}, server logs beside them; "
        f"{report.elapsed_s:.0f} s in all"
    )
    if report.failures:
        raise DemoFailed("\n".join(["checks that do not hold:", *report.failures]))
    return report


def _ask(
    config: DemoConfig, subject: Subject, documents: Sequence[Document], steps: Steps
) -> tuple[MeasuredPair, list[str]]:
    """Both servers, started and ended; what was measured of their answers, and what was wrong."""
    folder = config.out / "logs" / subject.title.replace(" ", "_").replace("/", "_")
    total = len(Condition) * sum(len(it.questions) for it in documents)
    starting = steps.step(f"Start two servers: {subject.title}")
    with (
        started(subject, folder, config.env, starting) as rig,
        steps.step("Answer questions, four ways", total) as advance,
    ):
        samples = rig.ask_all(documents, advance)
    metrics = {it.task.metric.value for it in documents if it.questions[0].answers}
    part = MeasuredPair(
        pair=subject.title,
        num_layers=subject.sender_identity.num_layers,
        block=(subject.block.start, subject.block.stop),
        dtype=subject.dtype,
        metric="+".join(sorted(metrics)),
        num_documents=len(documents),
        num_questions=len(samples[Condition.BLOCK]),
        tokens_per_document=round(fmean(len(it.prefix) for it in documents), 1),
        conditions=measured_of(samples),
    )
    return part, [
        *reuse_failures(samples, part.pair),
        *equality_failures(samples, part.pair, part.dtype),
    ]


class Steps:
    """Says what is going on: a bar on a terminal, lines elsewhere."""

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
