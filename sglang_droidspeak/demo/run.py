"""Run the demo: start a sender and a receiver, ask every question under every condition, and
report.

Prompts are made as the profiler makes them from documents and questions, or of random tokens.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import requests
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task, score
from profiles.environment import read_environment
from profiles.random_models import random_prompt
from sglang_droidspeak.cli.ask import state_of
from sglang_droidspeak.demo.config import DemoConfig, DemoFailed, Subject
from sglang_droidspeak.demo.report import DemoReport, MeasuredPair, draw, table_of, write_json
from sglang_droidspeak.demo.results import (
    Condition,
    Sample,
    Samples,
    check_quality,
    equality_failures,
    measured_of,
    reuse_failures,
    rotated,
)
from sglang_droidspeak.fleet.fleet import shared_cores
from sglang_droidspeak.fleet.servers import Server, ServerSpec, end_of, free_port, running
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance

PACKAGES = ("sglang-droidspeak", "sglang", "torch", "transformers")
PUBLISH_S = 60.0
"""Seconds to wait at most until peers know a document's pages."""
READY_S = 30.0
_LOOK_S = 0.05
_RANDOM: Final = Task(name="random", template="{context}{input}", metric=Metric.F1, max_new=4)
"""Task of the models of random weights. Four tokens suffice to compare answers; more would not
change the time to the first token."""
_NUM_DOCUMENTS: Final = 3
_NUM_TOKENS: Final = 2000
"""Number of tokens of each random document, in whole pages."""
_NUM_NEW_TOKENS: Final = 24
"""Number of tokens in the question about a random document."""
WARM_TOKENS: Final = 256
"""Number of tokens of the last document that the warm-up sends, before any time is measured."""


def run_demo(config: DemoConfig, console: Console) -> DemoReport:
    """Measure, report, and write `demo.json`, `demo.png` and the servers' logs.

    Raises DemoFailed if something did not work, or if a check does not hold. Results are written
    and shown before a failed check is raised.
    """
    begun_s, environment = time.monotonic(), read_environment(PACKAGES)
    subject, profile = config.pair()
    documents = config.documents(profile)
    (config.out / "logs").mkdir(parents=True, exist_ok=True)
    if config.instead:
        console.print(config.instead, highlight=False)

    pair, samples, failures = _measure(config, subject, documents, console)
    quality = check_quality(samples, profile)
    ceiling = None
    if config.times_random_pair:
        with tempfile.TemporaryDirectory(prefix="droidspeak-demo-") as folder:
            with step(console, "Write two models of random weights"):
                random = config.make_random(Path(folder))
            ceiling, _, more = _measure(config, random, random_documents(), console)
        failures += more

    report = DemoReport(
        pair=pair,
        ceiling=ceiling,
        failures=[*failures, *quality.failures],
        notes=[*quality.notes],
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


def _measure(
    config: DemoConfig, subject: Subject, documents: Sequence[Document], console: Console
) -> tuple[MeasuredPair, Samples, list[str]]:
    """Start the servers, measure their answers, and stop them. Returns means, all answers, and
    failed checks. Raises DemoFailed, with the end of the logs, if a server does not answer."""
    folder = config.out / "logs" / subject.title.replace(" ", "_").replace("/", "_")
    total = len(subject.conditions) * sum(len(it.questions) for it in documents)
    listen = f"tcp://127.0.0.1:{free_port()}"
    specs = specs_of(subject, config, listen)
    env = {**shared_cores(specs), **config.env}
    with contextlib.ExitStack() as stack:
        number = "two servers" if len(specs) == 2 else "a server"
        with step(console, f"Start {number}: {subject.title}"):
            servers = running(
                *specs, folder=folder, env=env, start_timeout_s=config.start_timeout_s
            )
            sender, *others = stack.enter_context(servers)
            receiver = others[0] if others else sender
        if others:
            _wait_for_peer(receiver)
        try:
            ways = f"{len(subject.conditions)} ways"
            with step(console, f"Answer questions, {ways}", total) as advance:
                samples = _samples(subject, sender, receiver, documents, advance)
        except requests.RequestException as exc:
            logs = [f"{log}:\n{end_of(log)}" for log in sorted(folder.glob("*.log"))]
            raise DemoFailed("\n\n".join([f"a server did not answer: {exc}", *logs])) from exc
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
    failures = [
        *reuse_failures(samples, part.pair),
        *equality_failures(samples, part.pair, part.dtype),
    ]
    return part, samples, failures


def specs_of(subject: Subject, config: DemoConfig, listen: str) -> tuple[ServerSpec, ...]:
    maps = {} if subject.e_maps_of is None else {"profiles": [str(subject.e_maps_of)]}
    keeps = {
        "capture_layers": [subject.block.start] if subject.block.start else [],
        "host_gb": config.host_gb,
    }
    # A profile's gate would refuse full reuse and the recompute of all layers.
    allows = {"gate": "none", **maps}
    # The receiver keeps nothing itself, so every prefix comes from the sender.
    fetches = {"peers": [listen], "host_gb": 0, "staging_gb": config.host_gb}
    sends = {"listen": listen, "fetch_deadline_s": PUBLISH_S}
    options, adapters = config.server_options, subject.adapters
    if config.servers == 1:
        both = keeps | allows
        return (
            ServerSpec(model=subject.sender, options=options, adapters=adapters, droidspeak=both),
        )
    return (
        ServerSpec(name="sender", model=subject.sender, options=options, droidspeak=keeps | sends),
        ServerSpec(
            name="receiver",
            model=subject.receiver,
            options=options,
            adapters=adapters,
            droidspeak=allows | fetches,
        ),
    )


def _wait_for_peer(receiver: Server) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        state, _ = state_of(receiver.url, None)
        (peer,) = state[KEY]["peers"]
        if peer["state"] == "ready":
            return
        if time.monotonic() > deadline_s:
            status = f"{peer['state']}: {peer['reason']}"
            raise DemoFailed(f"the sender's cache at {peer['address']} is {status}")
        time.sleep(_LOOK_S)


def _samples(
    subject: Subject,
    sender: Server,
    receiver: Server,
    documents: Sequence[Document],
    advance: Callable[[], None],
) -> Samples:
    """Return the answers to all questions under all conditions. Calls `advance` after each answer,
    except in the warm-up."""

    def answers(index: int, document: Document) -> Iterator[tuple[Condition, Sample]]:
        """Let the sender read the document, so that the receiver knows every page. Then ask the
        receiver all questions."""
        publish = {"publish": "before_reply"}
        sender.generate(document.prefix, max_new_tokens=1, droidspeak=publish, timeout_s=600)
        for condition in rotated(subject.conditions, index):
            for question in document.questions:
                sample = _sample(subject, receiver, condition, document, question)
                yield condition, msgspec.structs.replace(sample, document=index)

    last = documents[-1]
    short = replace(last, prefix=last.prefix[:WARM_TOKENS], questions=last.questions[:1])
    for _ in answers(0, short):
        pass
    samples: dict[Condition, list[Sample]] = {condition: [] for condition in subject.conditions}
    for index, document in enumerate(documents):
        for condition, sample in answers(index, document):
            samples[condition].append(sample)
            advance()
    return samples


def _sample(
    subject: Subject,
    receiver: Server,
    condition: Condition,
    document: Document,
    question: Question,
) -> Sample:
    """Return one answer of the receiver, after emptying its device cache."""
    receiver.flush()
    adapter = subject.activated if condition.is_activated else subject.adapter
    named = {"lora_path": adapter.name} if adapter else {}
    ttft_s, reply = receiver.stream(
        [*document.prefix, *question.suffix],
        max_new_tokens=document.task.max_new,
        **named,
        droidspeak=condition.controls(subject.identity.model_id, subject.block),
        timeout_s=600,
    )
    quality = None
    if question.answers and document.task.metric is not Metric.SAME:
        quality = score(document.task, reply["text"], question.answers, question.classes)
    (provenance,) = reply["meta_info"][KEY]
    return Sample(
        ttft_ms=1000 * ttft_s,
        quality=quality,
        token_ids=tuple(reply["output_ids"]),
        num_reusable=len(document.prefix),
        provenance=msgspec.convert(provenance, RequestProvenance),
    )


def random_documents() -> list[Document]:
    """Documents of random tokens, with one question each and no known answer."""
    return [
        Document(
            context="",
            prefix=tuple(random_prompt(_NUM_TOKENS, seed)),
            questions=(
                Question(
                    suffix=tuple(random_prompt(_NUM_NEW_TOKENS, _NUM_DOCUMENTS + seed)),
                    draft=(),
                    answers=(),
                    name=str(seed),
                ),
            ),
            task=_RANDOM,
        )
        for seed in range(_NUM_DOCUMENTS)
    ]


@contextlib.contextmanager
def step(console: Console, title: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show progress of one step: a bar on a terminal, lines elsewhere.

    Yields a function to call `total` times. Without `total` the length of the step is unknown.
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
