"""A base, adapters on it and a full fine-tune in servers of their own read one another's KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine_parts import CPU, SLOW_DEVICE, Answer, Watcher, answer, prompt
from forked import ServerSpec
from lora_parts import (
    BASE,
    INVOCATION,
    NUM_LAYERS,
    WITH_ACTIVATED,
    Checkpoints,
    assert_same_answers_without_reuse,
    plain_prompt,
    questions,
)

from benchmarks.random_adapters import activate
from cachetree.ids import EMPTY_SPAN, Span
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = pytest.mark.server

ADAPTERS = {
    "wide": {"rank": 8},
    "upper": {"rank": 4, "layers": (4, 5), "seed": 3},
    "judge": {"rank": 8, "seed": 5},
}
TUNED = "tuned"


@dataclass(frozen=True)
class Fleet:
    """A server for the base, one for a fine-tune, and one for the adapters."""

    servers: dict[str, Server]
    """By the model that they answer as."""
    models: Checkpoints
    watcher: Watcher

    def ask(self, name: str, tokens: list[int], **options) -> Answer:
        lora = {"lora_path": name} if name in ADAPTERS else {}
        return answer(self.servers[name], tokens, **lora, **options)

    def send(self, name: str, tokens: list[int]) -> None:
        self.ask(name, tokens, max_new_tokens=1, droidspeak={"mode": "off"})
        self.watcher.wait_for_model(tokens, self.models.model_id(name))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("across")
    models = Checkpoints.write(folder, ADAPTERS, TUNED)
    activate(models.adapters["judge"], INVOCATION)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(3)]
    specs = [
        ServerSpec(
            model=models.whole[TUNED if name == TUNED else BASE],
            name=name,
            options=WITH_ACTIVATED if adapters else CPU,
            adapters=adapters,
            droidspeak={
                "listen": address,
                "peers": [it for it in addresses if it != address],
                "capture_layers": list(range(1, NUM_LAYERS)),
                "gate": "none",
                "host_gb": 0.25,
            },
        )
        for name, adapters, address in zip(
            (BASE, TUNED, "adapted"), ({}, {}, models.adapters), addresses, strict=True
        )
    ]
    with running(*specs, folder=folder / "logs", env=SLOW_DEVICE) as (base, tuned, adapted):
        servers = {BASE: base, TUNED: tuned} | dict.fromkeys(ADAPTERS, adapted)
        watcher = Watcher(models.whole[BASE], addresses)
        try:
            yield Fleet(servers, models, watcher)
        finally:
            watcher.close()


CASES = [
    ("base", "wide", Span(2, 5)),
    ("wide", "base", Span(1, 3)),
    ("tuned", "upper", Span(0, 4)),
    ("wide", "tuned", Span(3, 6)),
]


@pytest.mark.parametrize(("sender", "receiver", "block"), CASES)
def test_block_equals_the_oracle(fleet: Fleet, sender: str, receiver: str, block: Span) -> None:
    tokens = prompt(200, seed=700 + CASES.index((sender, receiver, block)))
    fleet.send(sender, tokens)
    reply = fleet.ask(receiver, tokens, droidspeak=fleet.models.controls(sender, block))
    reply.assert_equals(fleet.models.expected(receiver, sender, tokens, block))
    assert reply.provenance["outcome"] == "reused"
    assert reply.provenance["location"].startswith("tcp://")


def test_an_adapter_reads_its_base_elsewhere_without_a_profile(fleet: Fleet) -> None:
    tokens = prompt(200, seed=800)
    fleet.send("base", tokens)
    reply = fleet.ask("upper", tokens)
    told = reply.provenance
    assert (told["outcome"], told["exact"], told["block"]) == ("reused", True, [4, 6])
    reply.assert_equals(fleet.models.expected("upper", "upper", tokens, EMPTY_SPAN))


def test_an_activated_adapter_answers_as_it_would_without_its_bases_kv(fleet: Fleet) -> None:
    asked = questions(seed=820)
    for it in asked.values():
        fleet.send(BASE, it.document)
    answers = assert_same_answers_without_reuse(
        fleet.servers["judge"], fleet.models, "judge", asked, lambda _it: None
    )
    for case, it in answers.items():
        told = it.provenance
        assert (told["outcome"], told["exact"], told["recomputed_layers"]) == ("reused", True, 0)
        assert told["location"].startswith("tcp://")
        assert told["not_invoked"] == (case == "never")


def test_the_base_reads_elsewhere_what_came_before_an_invocation(fleet: Fleet) -> None:
    before = plain_prompt(160, 840)
    fleet.ask("judge", [*before, *INVOCATION, *plain_prompt(20, 841)])
    fleet.watcher.wait_for_model(before, fleet.models.model_id(BASE))
    reply = fleet.ask(BASE, before)
    assert reply.provenance["location"].startswith("tcp://")
    assert reply.provenance["reused_tokens"] == 144
    reply.assert_equals(fleet.models.expected(BASE, BASE, before, EMPTY_SPAN))
