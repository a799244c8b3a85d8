"""The demo from its configuration to its report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from profiles.environment import read_environment
from sglang_droidspeak.demo.checks import equality_failures, quality_failures, reuse_failures
from sglang_droidspeak.demo.conditions import Condition
from sglang_droidspeak.demo.config import DemoConfig, RandomPair
from sglang_droidspeak.demo.documents import Document, from_records, random_documents
from sglang_droidspeak.demo.measure import ask_all, time_all
from sglang_droidspeak.demo.picture import draw
from sglang_droidspeak.demo.progress import Steps
from sglang_droidspeak.demo.report import DemoReport, Part, table_of, write_json
from sglang_droidspeak.demo.results import Samples, quality_of, speed_of
from sglang_droidspeak.demo.rig import DemoFailed, Rig, Subject, started

PACKAGES = ("sglang-droidspeak", "sglang", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One part of the demo."""

    on: Part
    documents: Sequence[Document]
    samples: Samples


def run_demo(config: DemoConfig, console: Console) -> DemoReport:
    """Measure, report, and write `demo.json`, `demo.png` and the servers' logs.

    Raises DemoFailed where something did not work or a check does not hold; what was measured is
    written and shown before that.
    """
    steps = Steps(console)
    environment = read_environment(PACKAGES)
    subject, profile = config.pair()
    (config.out / "logs").mkdir(parents=True, exist_ok=True)

    if config.random_pair is None:
        answered, timed = _own_pair(config, subject, steps)
    else:
        answered = _quality(config, subject, steps)
        timed = _random_speed(config, config.random_pair, steps)

    accepted = [it.answers for document in answered.documents for it in document.questions]
    quality, speed = quality_of(answered.samples, accepted), speed_of(timed.samples)
    report = DemoReport(
        quality=quality,
        speed=speed,
        quality_on=answered.on,
        speed_on=timed.on,
        failures=[
            *reuse_failures(answered.samples, "quality"),
            *reuse_failures(timed.samples, "speed"),
            *equality_failures(answered.samples, "quality", answered.on.dtype),
            *equality_failures(timed.samples, "speed", timed.on.dtype),
            *quality_failures(quality, profile),
        ],
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


def _quality(config: DemoConfig, subject: Subject, steps: Steps) -> Measured:
    with _started(config, subject, "the trained pair", steps) as rig:
        return _answer(config, rig, steps)


def _own_pair(config: DemoConfig, subject: Subject, steps: Steps) -> tuple[Measured, Measured]:
    """Both parts on one pair of servers."""
    with _started(config, subject, "the pair", steps) as rig:
        answered = _answer(config, rig, steps)
        documents = answered.documents[: config.num_documents + 1]
        if len(documents) < 2:
            raise DemoFailed(f"{config.data} has one document; timing needs another to warm up")
        return answered, _time(rig, documents, answered.on.pair, steps)


def _random_speed(config: DemoConfig, pair: RandomPair, steps: Steps) -> Measured:
    with tempfile.TemporaryDirectory(prefix="droidspeak-demo-") as folder:
        with steps.waiting(f"Write two models, {pair.title}"):
            subject = config.make_random(pair, Path(folder))
        with _started(config, subject, "the random pair", steps) as rig:
            documents = random_documents(
                config.num_documents + 1, pair.num_tokens, pair.num_new_tokens
            )
            return _time(rig, documents, pair.title, steps)


def _started(config: DemoConfig, subject: Subject, title: str, steps: Steps):
    folder = config.out / "logs" / title.replace(" ", "_")
    return started(subject, folder, config.env, steps.waiting(f"Start two servers: {title}"))


def _answer(config: DemoConfig, rig: Rig, steps: Steps) -> Measured:
    documents = from_records(config.records(), config.template, rig.tokenize)
    num_questions = sum(len(document.questions) for document in documents)
    with steps.counted("Answer questions, four ways", num_questions * len(Condition)) as advance:
        samples = ask_all(rig, documents, config.max_new, advance)
    pair = f"{config.sender.name} → {config.receiver.name}"
    return Measured(on=_part(rig, documents, samples, pair), documents=documents, samples=samples)


def _time(rig: Rig, documents: Sequence[Document], pair: str, steps: Steps) -> Measured:
    with steps.counted("Time long documents, four ways", len(documents) * len(Condition)) as it:
        samples = time_all(rig, documents, it)
    part = _part(rig, documents[1:], samples, pair)
    return Measured(on=part, documents=documents, samples=samples)


def _part(rig: Rig, documents: Sequence[Document], samples: Samples, pair: str) -> Part:
    subject = rig.subject
    return Part(
        pair=pair,
        num_layers=subject.sender_identity.num_layers,
        block=(subject.block.start, subject.block.stop),
        dtype=subject.dtype,
        num_documents=len(documents),
        num_requests=len(samples[Condition.BLOCK]),
        tokens_per_document=round(fmean(len(document.shared) for document in documents), 1),
    )
