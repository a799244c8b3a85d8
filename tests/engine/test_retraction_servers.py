"""KV that a server holds as exact is exact, after any retraction of its requests.

Requests are retracted while they decode, or while their prompt is read in chunks beside decoding
requests. They continue each other's answers, are experiments, have several samples, or are aborted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import requests
from engine_parts import ENV, Answer, answer, profile_of, prompt
from server_parts import servers

from cachetree.checkpoint.identity import read_model_identity
from cachetree.planning.profile import write_profile
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server

pytestmark = pytest.mark.server

RETRACTING = ENV | {"FORKED_BEFORE": str(Path(__file__).with_name("retracting.py"))}
NUM_TALKS, NUM_TURNS = 9, 4
NEAR = 2e-4


@dataclass
class Rig:
    """A receiver, and a sender that has read some documents."""

    receiver: Server
    documents: Sequence[list[int]]
    sender: str
    replies: list[tuple[list[int], Answer]] = field(default_factory=list)
    num_retractions: int = 0

    def talk(self, number: int, random: Random) -> None:
        """Hold a conversation about a document. Each turn follows the answers before it."""
        tokens = self.documents[number % len(self.documents)]
        for turn in range(NUM_TURNS):
            kind = random.choice([self.auto, self.auto, self.off, self.experiment])
            if random.random() < 0.2:
                random.choice([self.samples, self.aborted])(tokens, f"{number}-{turn}")
            reply = kind(tokens)
            self.num_retractions += reply.meta["num_retractions"]
            self.replies.append((tokens, reply))
            tokens = [*tokens, *reply.ids, *prompt(random.randrange(5, 60), 1000 + number)]

    def auto(self, tokens: list[int]) -> Answer:
        return answer(self.receiver, tokens)

    def off(self, tokens: list[int]) -> Answer:
        return answer(self.receiver, tokens, droidspeak={"mode": "off"})

    def experiment(self, tokens: list[int]) -> Answer:
        controls = {"sender": self.sender, "block": "none"}
        return answer(self.receiver, tokens, droidspeak=controls)

    def samples(self, tokens: list[int], _rid: str) -> None:
        params = {"n": 2, "temperature": 0.7}
        self.receiver.generate(tokens, max_new_tokens=8, sampling_params=params)

    def aborted(self, tokens: list[int], rid: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(answer, self.receiver, tokens, rid=rid, max_new_tokens=200)
            time.sleep(0.05)
            requests.post(f"{self.receiver.url}/abort_request", json={"rid": rid}, timeout=10)
            reply.result()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("retraction")
    config = shape("llama", layers=4, hidden=256, heads=4, kv_heads=2)
    models = write_models(folder, config, ["sender", "receiver"])
    identities = [read_model_identity(it) for it in models]
    write_profile(profile_of(*identities), folder / "pair.json")
    sends = {"capture_layers": [1, 2, 3]}
    reads = {"profiles": [str(folder / "pair.json")], "host_gb": 0.5}
    reader = {"enable-mixed-chunk": True, "max-running-requests": 6}
    documents = [prompt(130 + 31 * i, seed=500 + i) for i in range(4)]
    with servers(folder, models, sends, reads, reader=reader, env=RETRACTING) as pair:
        for tokens in documents[:3]:
            pair.send(tokens)
        yield Rig(pair.receiver, documents, identities[0].model_id)


SEED = int(os.environ.get("DROIDSPEAK_TEST_SEED", "0")) or Random().randrange(1, 1 << 30)


def test_what_is_held_as_exact_is_exact_and_every_answer_says_what_it_read(rig):
    print(f"DROIDSPEAK_TEST_SEED={SEED}")
    seeds = [Random(SEED + number) for number in range(NUM_TALKS)]
    with ThreadPoolExecutor(NUM_TALKS) as pool:
        list(pool.map(rig.talk, range(NUM_TALKS), seeds))
    assert rig.num_retractions > 0
    # Each once, the longest first: in its answer's KV, too.
    prompts = {(*tokens, *reply.ids[:-1]) for tokens, reply in rig.replies}
    asked = [list(it) for it in sorted(prompts, key=len, reverse=True)]
    on_device = [rig.off(tokens) for tokens in asked]
    assert sum(it.meta["cached_tokens"] for it in on_device) > 0
    rig.receiver.flush()
    stored = [rig.auto(tokens) for tokens in asked]
    own = [it for it in stored if it.provenance["outcome"] == "own"]
    assert own, "none of it was stored"
    rig.receiver.flush()
    for tokens, held, again in zip(asked, on_device, stored, strict=True):
        alone = rig.off(tokens)
        assert held.provenance["exact"]
        assert held.logprobs == pytest.approx(alone.logprobs, abs=NEAR)
        is_own = again.logprobs == pytest.approx(alone.logprobs, abs=NEAR)
        assert again.provenance["exact"] == is_own, again.provenance
    rig.receiver.flush()
    for tokens, reply in rig.replies:
        is_own = reply.logprobs == pytest.approx(rig.off(tokens).logprobs, abs=NEAR)
        assert reply.provenance["exact"] == is_own, reply.provenance
    assert {reply.provenance["exact"] for _, reply in rig.replies} == {False, True}
