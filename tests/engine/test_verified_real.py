"""Verified answers of a real model, to questions that full reuse gets wrong. `make real` first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_parts import CPU, SLOW_DEVICE, Answer, Watcher
from forked import ServerSpec

from cachetree.checkpoint.identity import read_model_identity
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import Document, make_documents
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from sglang_droidspeak.fleet.servers import Server, free_port, running

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "build/real"
SENDER, RECEIVER = MADE / "base", MADE / "merged/questions"
PROFILE = ROOT / "examples/real/base_to_questions.json"
NUM_DOCUMENTS = 20

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not RECEIVER.exists(), reason="run `make real` first"),
]


def documents(skill: str) -> list[Document]:
    """Those that nothing was chosen on."""
    options = TaskOptions(template="{context}\n\n{input}", chat=True, metric=Metric.F1, max_new=56)
    sources = load_sources([str(MADE / f"data/{skill}/verify.jsonl")], options)
    tokenizer = load_tokenizer(ModelSource(path=RECEIVER))
    return make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)


def timed(server: Server, tokens: Sequence[int], droidspeak: dict) -> tuple[float, Answer]:
    server.flush()
    begun_s = time.monotonic()
    reply = Answer(server.generate(tokens, max_new_tokens=32, droidspeak=droidspeak))
    return time.monotonic() - begun_s, reply


@pytest.mark.parametrize("block", ["plan", "none"])
def test_verified_answers_are_full_prefills(block: str, tmp_path: Path) -> None:
    """By the plan of the profile, and from the sender's KV of all layers."""
    address = f"tcp://127.0.0.1:{free_port()}"
    options = {**CPU, "chunked-prefill-size": 2048}
    reads = {"peers": [address], "profiles": [str(PROFILE)], "gate": "off", "verify_lag": 8}
    specs = [
        ServerSpec(
            model=SENDER,
            name="sender",
            options=options,
            droidspeak={"listen": address, "profiles": [str(PROFILE)]},
        ),
        ServerSpec(model=RECEIVER, name="receiver", options=options, droidspeak=reads),
    ]
    asked = {"verify": True, "sender": read_model_identity(SENDER).model_id}
    asked |= {} if block == "plan" else {"block": "none"}
    taken: dict[str, list[float]] = {"verified": [], "full prefill": [], "reuse": []}
    parts = []
    with running(*specs, folder=tmp_path, env=SLOW_DEVICE) as (sender, receiver):
        watcher = Watcher(RECEIVER, [address])
        for document in documents("questions")[:NUM_DOCUMENTS]:
            tokens = [*document.prefix, *document.questions[0].suffix]
            sender.generate(tokens, max_new_tokens=1)
            watcher.wait_for(tokens, SENDER)
            seconds, reply = timed(receiver, tokens, asked)
            taken["verified"].append(seconds)
            parts.append(reply.provenance["verified"])
            seconds, alone = timed(receiver, tokens, {"mode": "off"})
            taken["full prefill"].append(seconds)
            seconds, _ = timed(receiver, tokens, {**asked, "verify": False})
            taken["reuse"].append(seconds)
            assert (reply.ids, reply.text) == (alone.ids, alone.text)
            assert reply.meta["finish_reason"] == alone.meta["finish_reason"]
        watcher.close()
    sums = {name: sum(it[name] for it in parts) for name in parts[0]}
    print(sums, {name: round(statistics.median(it), 3) for name, it in taken.items()})
    assert (sums["redone"] > 0) or block == "plan"
