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
from sglang_droidspeak.demo.config import DemoConfig, DemoFailed, Subject
from sglang_droidspeak.demo.report import DemoReport, MeasuredPair, draw, table_of, write_json
from sglang_droidspeak.demo.results import (
    Condition,
    equality_failures,
    measured_of,
    quality_failures,
    reuse_failures,
)
from sglang_droidspeak.demo.rig import Advance, random_documents, started

PACKAGES = ("sglang-droidspeak", "sglang", "torch", "transformers")


def run_demo(config: DemoConfig, console: Console) -> DemoReport:
    """Measure, report, and write `demo.json`, `demo.png` and the servers' logs.

    Raises DemoFailed where something did not work or a check does not hold; what was measured is
    written and shown before that.
    """
    begun_s = time.monotonic()
    environment = read_environment(PACKAGES)
    subject, profile = config.pair()
    documents = config.documents(profile)
    (config.out / "logs").mkdir(parents=True, exist_ok=True)
    if config.instead:
        console.print(config.instead, highlight=False)

    pair, failures = _ask(config, subject, documents, console)
    ceiling = None
    if config.times_random_pair:
        with tempfile.TemporaryDirectory(prefix="droidspeak-demo-") as folder:
            with step(console, "Write two models of random weights"):
                random = config.make_random(Path(folder))
            ceiling, more = _ask(config, random, random_documents(), console)
        failures += more

    report = DemoReport(
        pair=pair,
        ceiling=ceiling,
        failures=[*failures, *quality_failures(pair.conditions, profile)],
        elapsed_s=round(time.monotonic() - begun_s, 1),
        environment=environment,
    )
    write_json(report, config.out / "demo.json")
    draw(report, config.out / "demo.png")
    console.print(table_of(report))
    console.print(
        f"{config.out / 'demo.json'}, {config.out / 'demo.png'}, server logs beside them; "
        f"{report.elapsed_s:.0f} s in all",
        highlight=False,
    )
    if report.failures:
        raise DemoFailed("\n".join(["checks that do not hold:", *report.failures]))
    return report


def _ask(
    config: DemoConfig, subject: Subject, documents: Sequence[Document], console: Console
) -> tuple[MeasuredPair, list[str]]:
    """Both servers, started and ended; what was measured of their answers, and what was wrong."""
    folder = config.out / "logs" / subject.title.replace(" ", "_").replace("/", "_")
    total = len(Condition) * sum(len(it.questions) for it in documents)
    starting = step(console, f"Start two servers: {subject.title}")
    with (
        started(subject, config, folder, starting) as rig,
        step(console, "Answer questions, four ways", total) as advance,
    ):
        samples = rig.ask_all(documents, advance)
    metrics = {it.task.metric.value for it in documents if it.questions[0].answers}
    part = MeasuredPair(
        pair=subject.title,
        num_layers=subject.identity.num_layers,
        block=(subject.block.start, subject.block.stop),
        dtype=config.resolved_dtype,
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


@contextlib.contextmanager
def step(console: Console, title: str, total: int | None = None) -> Iterator[Advance]:
    """Says what is going on: a bar on a terminal, lines elsewhere.

    Of `total` parts, after each of which the value is called, or of unknown length.
    """
    begun_s, columns = time.monotonic(), [TextColumn("{task.description:<34}"), BarColumn(30)]
    if total is not None:
        columns.append(MofNCompleteColumn())
    columns.append(TimeElapsedColumn())
    is_quiet = not console.is_terminal
    if is_quiet:
        console.print(f"{title} ...", highlight=False)
    with Progress(*columns, console=console, disable=is_quiet) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, total=total or 1, completed=total or 1)
    if is_quiet:
        seconds = time.monotonic() - begun_s
        console.print(f"{title}: done in {seconds:.1f} s", highlight=False)
