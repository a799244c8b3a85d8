"""S14: how good the answers are, and how long the first token takes, of one way beside another.

Every way is served, so quality and time are of the same requests. No smaller model that has the
receiver's skill is there to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.random_servers import rotated
from profiles.data.documents import Document
from profiles.data.tasks import score
from profiles.report import words
from profiles.stats.gate import interval
from sglang_droidspeak.demo import DemoConfig
from sglang_droidspeak.demo.config import Subject
from sglang_droidspeak.demo.run import specs_of
from sglang_droidspeak.fleet.servers import Server, free_port, running

from .measures import percentiles
from .rig import Size
from .studies import Found, Say

FULL, REUSE, CORRECTED = "full prefill", "full reuse", ", E corrected"
NUM_BLOCKS = 3
"""Of each pair's frontier, the shortest that begin with E."""


@dataclass(frozen=True)
class Pair:
    name: str
    config: DemoConfig


@dataclass(frozen=True)
class Way:
    """How a server is to answer."""

    name: str
    server: Server
    controls: Mapping[str, str]


def pairs(size: Size) -> list[Pair]:
    """Those that are here: the real one where `make real` has been run. Each document is asked
    about once."""
    asked: dict[str, Any] = {"num_documents": size.num_judged, "num_questions_each": 1}
    small, real = DemoConfig.small(), DemoConfig.shipped()
    found = [Pair("small pair", replace(small, **asked))]
    if real.data != small.data:
        held_out = real.data.with_name("held_out.jsonl")
        config = replace(real, data=held_out, **asked)
        found.append(Pair("base → questions", config))
    return [it for it in found if it.name in size.judged_pairs]


def quality_and_delay(size: Size, folder: Path, say: Say) -> Found:
    found: dict[str, Any] = {}
    requests: list[dict[str, Any]] = []
    for pair in pairs(size):
        subject, profile = pair.config.pair()
        blocks = [it for it in profile.frontier if it.start][:NUM_BLOCKS]
        corrected = {it.block for it in profile.blocks if it.e_map is not None}
        documents = pair.config.documents(profile)
        say(f"{pair.name}: {len(documents)} documents")
        starts = [it.start for it in blocks]
        with _served(pair, subject, starts, folder / str(len(found))) as (sender, plain, mapped):
            ways = [Way(FULL, plain, {"mode": "off"}), Way(REUSE, plain, {"block": "none"})]
            for it in blocks:
                named, said = {"block": f"{it.start}:{it.stop}"}, words.span(it.block)
                ways.append(Way(f"block {said}", plain, named))
                if it.block in corrected:
                    ways.append(Way(f"block {said}{CORRECTED}", mapped, named))
            asked = _ask_all(sender, ways, documents)
        found[pair.name] = {name: _row(of) for name, of in asked.items()}
        requests += [
            {"pair": pair.name, "way": way, **it} for way, of in asked.items() for it in of
        ]
    return Found({"rows": found}, requests)


@contextmanager
def _served(
    pair: Pair, subject: Subject, starts: Sequence[int], folder: Path
) -> Iterator[Sequence[Server]]:
    """A sender, and two receivers: E as it is, and corrected by the maps of proven plans."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    sender, receiver = specs_of(subject, pair.config, listen)
    settings = {**receiver.droidspeak} if receiver.droidspeak else {}
    mapped = replace(receiver, name="mapped", port=free_port())
    settings.pop("profiles", None)
    plain = replace(receiver, droidspeak=settings)
    sends = {**(sender.droidspeak or {}), "capture_layers": sorted(starts)}
    specs = (replace(sender, droidspeak=sends), plain, mapped)
    with running(*specs, folder=folder, env=pair.config.env) as servers:
        yield servers


def _ask_all(
    sender: Server, ways: Sequence[Way], documents: Sequence[Document]
) -> dict[str, list[dict[str, Any]]]:
    """Every way about every document, another one first each time. The first document is asked
    about before, as a server's first requests are slow."""
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    for index, document in enumerate([documents[0], *documents]):
        sender.generate(
            document.prefix,
            max_new_tokens=1,
            droidspeak={"publish": "before_reply"},
            timeout_s=600,
        )
        for way in rotated(ways, index):
            answer = _ask(way, document)
            if index:
                wanted = "off" if way.name == FULL else "reused", way.name.endswith(CORRECTED)
                assert (answer["outcome"], answer["e_corrected"]) == wanted, answer
                found[way.name].append(answer)
    return found


def _ask(way: Way, document: Document) -> dict[str, Any]:
    (question,) = document.questions
    way.server.flush()
    ttft_s, reply = way.server.stream(
        [*document.prefix, *question.suffix],
        max_new_tokens=document.task.max_new,
        droidspeak=way.controls,
        timeout_s=600,
    )
    (provenance,) = reply["meta_info"]["droidspeak"]
    return {
        "ttft_s": ttft_s,
        "quality": score(document.task, reply["text"], question.answers, question.classes),
        "outcome": provenance["outcome"],
        "e_corrected": provenance["e_corrected"],
    }


def _row(asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    quality = interval([[it["quality"]] for it in asked])
    times = percentiles("ttft_ms", [it["ttft_s"] for it in asked])
    judged = [quality.low, quality.high]
    return {"quality": quality.mean, "quality_interval": judged, **times}
