"""The drift guard of a real pair: healthy, and with a sender that has drifted. Run `make real`
first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from engine_parts import CPU, SHORT_HOURS, Answer, Watcher, eventually
from forked import ServerSpec
from test_guard_servers import OFF, a_quarter_away, of_another_sender

from cachetree.checkpoint import read_model_identity
from cachetree.planning import read_profile, write_profile
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import Document, make_documents
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from sglang_droidspeak.fleet.servers import Server, free_port, running
from sglang_droidspeak.guard.plans import GuardState, WatchedPair

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "build/real"
SENDER, RECEIVER = MADE / "base", MADE / "merged/questions"
PROFILE = ROOT / "examples/real/base_to_questions.json"
BLOCK = (6, 24)
"""Block of one plan of the pair's profile."""
TV_BOUND = 0.125
"""Bound of the plan's distance, measured on the first 42 held-out documents. The profile does not
have one yet."""
NUM_HEALTHY = 2
"""Number of documents, each with three questions."""
NUM_DRIFTED = 6

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not RECEIVER.exists(), reason="run `make real` first"),
]


def documents() -> list[Document]:
    """Return documents of the receiver's skill that no choice has used."""
    options = TaskOptions(template="{context}\n\n{input}", chat=True, metric=Metric.F1, max_new=16)
    sources = load_sources([str(MADE / "data/questions/verify.jsonl")], options)
    tokenizer = load_tokenizer(ModelSource(path=RECEIVER))
    return make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)


def pair_of(receiver: Server, sender: Path) -> WatchedPair:
    state = msgspec.convert(receiver.post("/droidspeak/guard"), GuardState)
    model = read_model_identity(sender).model_id
    (pair,) = (it for it in state.pairs if it.sender == model)
    return pair


def compared(receiver: Server, sender: Path, asked: Sequence[Sequence[int]]) -> WatchedPair:
    """Ask all of these. Return once all were reused and compared, or once the pair is out of
    service."""
    for num, tokens in enumerate(asked, 1):
        receiver.flush()
        provenance = Answer(receiver.generate(tokens, max_new_tokens=8)).provenance
        assert (provenance["outcome"], provenance["block"]) == ("reused", [*BLOCK])
        eventually(lambda num=num: num_shadows(pair_of(receiver, sender)) == num)
        if not pair_of(receiver, sender).num_left:
            break
    return pair_of(receiver, sender)


def questions(of: Sequence[Document]) -> list[list[int]]:
    return [[*it.prefix, *question.suffix] for it in of for question in it.questions]


def num_shadows(pair: WatchedPair) -> int:
    return sum(it.num_shadows for it in pair.plans)


def test_a_healthy_pair_stays_in_service_and_a_drifted_sender_does_not(tmp_path):
    """The drifted sender is half of the way to random weights, under the profile of the sender
    before."""
    drifted = of_another_sender(tmp_path, partial(a_quarter_away, share=0.5), SENDER)
    profile = read_profile(PROFILE)
    (plan,) = (it for it in profile.blocks if (it.start, it.stop) == BLOCK)
    plan = msgspec.structs.replace(plan, tv_bound=plan.tv_bound or TV_BOUND)
    everything = max(profile.blocks, key=lambda it: len(it.block))
    for model in (SENDER, drifted):
        of_it = msgspec.structs.replace(
            profile, sender=read_model_identity(model), blocks=(plan, everything), recommended=plan
        )
        write_profile(of_it, tmp_path / f"{model.name}.json")
    options = {**CPU, "chunked-prefill-size": 2048}
    at = {model: f"tcp://127.0.0.1:{free_port()}" for model in (SENDER, drifted)}
    reads = {
        "peers": [*at.values()],
        "profiles": [str(tmp_path / f"{model.name}.json") for model in at],
        "host_gb": 0,
        "shadow_rate": 1.0,
        "guard_path": str(tmp_path / "guard.json"),
    }
    specs = [
        ServerSpec(
            model=model,
            name=model.name,
            options=options,
            droidspeak={"listen": address, "capture_layers": [BLOCK[0]], "host_gb": 0.5},
        )
        for model, address in at.items()
    ]
    specs.append(ServerSpec(model=RECEIVER, name="receiver", options=options, droidspeak=reads))
    texts = documents()[: NUM_HEALTHY + NUM_DRIFTED]
    of_each = {SENDER: texts[:NUM_HEALTHY], drifted: texts[NUM_HEALTHY:]}
    with running(*specs, folder=tmp_path, env=SHORT_HOURS) as (*senders, receiver):
        watcher = Watcher(RECEIVER, [*at.values()])
        for (model, texts_of_one), sender in zip(of_each.items(), senders, strict=True):
            for text in texts_of_one:  # Without a question, as their profile was made.
                sender.generate(text.prefix, max_new_tokens=1)
                watcher.wait_for(text.prefix, model)
        watcher.close()
        asked = questions(of_each[SENDER])
        healthy = compared(receiver, SENDER, asked)
        (of_healthy,) = healthy.plans
        print(of_healthy)
        assert (healthy.num_left, of_healthy.num_shadows) == (1, len(asked))
        assert of_healthy.mean_tv <= of_healthy.allowed

        asked = questions(of_each[drifted])
        bad = compared(receiver, drifted, asked)
        print(bad)
        assert bad.num_left == 0
        receiver.flush()
        after, alone = (
            Answer(receiver.generate(asked[-1], max_new_tokens=8, droidspeak=it))
            for it in (None, OFF)
        )
        assert (after.provenance["outcome"], after.ids) == ("gate_failed", alone.ids)
        assert pair_of(receiver, SENDER).num_left == 1
