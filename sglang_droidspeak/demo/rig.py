"""A sender and a receiver, started and asked every question under every condition.

What is asked is as the profiler makes it of questions about documents, or random tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import requests

from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task, score
from profiles.random_models import random_prompt
from sglang_droidspeak.cli.live import state_of
from sglang_droidspeak.demo.config import DemoConfig, DemoFailed, Subject
from sglang_droidspeak.demo.results import Condition, Sample, Samples, rotated
from sglang_droidspeak.fleet.fleet import shared_cores
from sglang_droidspeak.fleet.servers import Server, ServerSpec, end_of, free_port, running
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance

Advance = Callable[[], None]

PUBLISH_S = 60.0
"""Longest that a document's pages take to be on offer."""
READY_S = 30.0
_LOOK_S = 0.05
_RANDOM: Final = Task(name="random", template="{context}{input}", metric=Metric.F1, max_new=4)
"""Enough to compare answers; the time to the first token does not depend on the others."""
_NUM_DOCUMENTS: Final = 3
_NUM_TOKENS: Final = 2000
"""Of each such document, in whole pages;"""
_NUM_NEW_TOKENS: Final = 24
"""and of the question about it."""
WARM_TOKENS: Final = 256
"""Of the last document, which is read and asked about first, so that nothing is new to the servers
when times begin to count."""


def _specs(subject: Subject, config: DemoConfig, listen: str) -> tuple[ServerSpec, ServerSpec]:
    maps = {} if subject.e_maps_of is None else {"profiles": [str(subject.e_maps_of)]}
    sends = {
        "listen": listen,
        "capture_layers": [subject.block.start] if subject.block.start else [],
        "host_gb": config.host_gb,
        "fetch_deadline_s": PUBLISH_S,
    }
    # Off: full reuse and all layers are no blocks that a profile's gate lets through.
    # It keeps nothing itself, so that every prefix comes from the sender.
    receives = {
        "peers": [listen],
        "gate": "off",
        "host_gb": 0,
        "staging_gb": config.host_gb,
        **maps,
    }
    sender, receiver = (
        ServerSpec(model=model, name=name, options=config.server_options, droidspeak=settings)
        for model, name, settings in (
            (subject.sender, "sender", sends),
            (subject.receiver, "receiver", receives),
        )
    )
    return sender, receiver


@dataclass(eq=False)
class Rig:
    """Made by `started`. Methods block."""

    subject: Subject
    _sender: Server
    _receiver: Server

    def ask_all(self, documents: Sequence[Document], advance: Advance) -> Samples:
        """`advance` is called after each counted answer."""
        last = documents[-1]
        short = replace(last, prefix=last.prefix[:WARM_TOKENS], questions=last.questions[:1])
        for _ in self._answers(0, short):
            pass
        samples: dict[Condition, list[Sample]] = {condition: [] for condition in Condition}
        for index, document in enumerate(documents):
            for condition, sample in self._answers(index, document):
                samples[condition].append(sample)
                advance()
        return samples

    def _answers(self, index: int, document: Document) -> Iterator[tuple[Condition, Sample]]:
        """Have the sender read the document; the receiver knows of every page then."""
        publish = {"publish": "before_reply"}
        self._sender.generate(document.prefix, max_new_tokens=1, droidspeak=publish, timeout_s=600)
        for condition in rotated(index):
            for question in document.questions:
                yield condition, self._ask(condition, document, question)

    def _ask(self, condition: Condition, document: Document, question: Question) -> Sample:
        """One answer of a receiver whose device cache is empty."""
        self._receiver.flush()
        subject, task = self.subject, document.task
        ttft_s, reply = self._receiver.stream(
            [*document.prefix, *question.suffix],
            max_new_tokens=task.max_new,
            droidspeak=condition.controls(subject.identity.model_id, subject.block),
            timeout_s=600,
        )
        quality = None
        if question.answers:
            quality = score(task, reply["text"], question.answers, question.classes)
        (provenance,) = reply["meta_info"][KEY]
        return Sample(
            ttft_ms=1000 * ttft_s,
            quality=quality,
            token_ids=tuple(reply["output_ids"]),
            num_reusable=len(document.prefix),
            provenance=msgspec.convert(provenance, RequestProvenance),
        )


@contextlib.contextmanager
def started(
    subject: Subject,
    config: DemoConfig,
    folder: Path,
    starting: contextlib.AbstractContextManager[object],
) -> Iterator[Rig]:
    """Both servers, started side by side within `starting`; ended however the block is left.

    A server that does not answer raises DemoFailed, with the end of both logs.
    """
    listen = f"tcp://127.0.0.1:{free_port()}"
    specs = _specs(subject, config, listen)
    env = {**shared_cores(specs), **config.env}
    with contextlib.ExitStack() as stack:
        with starting:
            servers = stack.enter_context(running(*specs, folder=folder, env=env))
        deadline_s = time.monotonic() + READY_S
        while (peer := state_of(servers[1].url, None)[KEY]["peers"][0])["state"] != "ready":
            if time.monotonic() > deadline_s:
                found = f"{peer['state']}: {peer['reason']}"
                raise DemoFailed(f"the sender's cache at {listen} is {found}")
            time.sleep(_LOOK_S)
        try:
            yield Rig(subject, *servers)
        except requests.RequestException as exc:
            logs = [f"{log}:\n{end_of(log)}" for log in sorted(folder.glob("*.log"))]
            raise DemoFailed("\n\n".join([f"a server did not answer: {exc}", *logs])) from exc


def random_documents() -> list[Document]:
    """Of the randomly initialised models' tokens; one question each, without an answer."""
    return [
        Document(
            context="",
            prefix=tuple(random_prompt(_NUM_TOKENS, seed)),
            questions=(
                Question(
                    suffix=tuple(random_prompt(_NUM_NEW_TOKENS, _NUM_DOCUMENTS + seed)),
                    reference=(),
                    answers=(),
                    name=str(seed),
                ),
            ),
            task=_RANDOM,
        )
        for seed in range(_NUM_DOCUMENTS)
    ]
