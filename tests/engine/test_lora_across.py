"""A base, adapters on it and a full fine-tune, each in its own server, read each other's KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_parts import free_address, prompt
from teams import (
    BASE,
    INVOCATION,
    NUM_LAYERS,
    WITH_ACTIVATED,
    Checkpoints,
    Team,
    assert_same_answers_without_reuse,
    plain_prompt,
    questions,
    team_of,
)

from benchmarks.random_adapters import activate
from cachetree.ids import EMPTY_SPAN, Span

pytestmark = pytest.mark.server

ADAPTERS = {
    "wide": {"rank": 8},
    "upper": {"rank": 4, "layers": (4, 5), "seed": 3},
    "judge": {"rank": 8, "seed": 5},
}
TUNED = "tuned"


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Team]:
    """Start the base, a fine-tune and the adapters, each in its own server."""
    models = Checkpoints.write(tmp_path_factory.mktemp("across"), ADAPTERS, TUNED)
    activate(models.adapters["judge"], INVOCATION)
    addresses = [free_address() for _ in range(3)]
    with_adapters = {"options": WITH_ACTIVATED, "adapters": models.adapters}
    specs = [
        models.server(
            model,
            **more,
            listen=address,
            peers=[it for it in addresses if it != address],
            capture_layers=[*range(1, NUM_LAYERS)],
            gate="none",
            host_gb=0.25,
        )
        for address, (model, more) in zip(
            addresses,
            [(BASE, {}), (TUNED, {}), (BASE, {"name": "adapted"} | with_adapters)],
            strict=True,
        )
    ]
    with team_of(models, *specs) as team:
        yield team


CASES = [
    ("base", "wide", Span(2, 5)),
    ("wide", "base", Span(1, 3)),
    ("tuned", "upper", Span(0, 4)),
    ("wide", "tuned", Span(3, 6)),
]


@pytest.mark.parametrize(("sender", "receiver", "block"), CASES)
def test_block_equals_the_oracle(team, sender, receiver, block):
    tokens = prompt(200, seed=700 + CASES.index((sender, receiver, block)))
    team.send(sender, tokens)
    reply = team.ask(receiver, tokens, droidspeak=team.models.controls(sender, block))
    reply.assert_equals(team.models.expected(receiver, sender, tokens, block))
    assert reply.provenance["outcome"] == "reused"
    assert reply.provenance["location"].startswith("tcp://")


def test_an_adapter_reads_its_base_elsewhere_without_a_profile(team):
    tokens = prompt(200, seed=800)
    team.send("base", tokens)
    reply = team.ask("upper", tokens)
    provenance = reply.provenance
    assert (provenance["outcome"], provenance["exact"], provenance["block"]) == (
        "reused",
        True,
        [4, 6],
    )
    reply.assert_equals(team.models.expected("upper", "upper", tokens, EMPTY_SPAN))


def test_an_activated_adapter_answers_as_it_would_without_its_bases_kv(team):
    asked = questions(seed=820)
    for reply in asked.values():
        team.send(BASE, reply.document)
    answers = assert_same_answers_without_reuse(
        team.servers["judge"], team.models, "judge", asked, lambda _it: None
    )
    for case, reply in answers.items():
        provenance = reply.provenance
        assert (provenance["outcome"], provenance["exact"], provenance["recomputed_layers"]) == (
            "reused",
            True,
            0,
        )
        assert provenance["location"].startswith("tcp://")
        assert provenance["not_invoked"] == (case == "never")


def test_the_base_reads_elsewhere_what_came_before_an_invocation(team):
    before = plain_prompt(160, 840)
    team.ask("judge", [*before, *INVOCATION, *plain_prompt(20, 841)])
    team.watcher.wait_for_model(before, team.models.model_id(BASE))
    reply = team.ask(BASE, before)
    assert reply.provenance["location"].startswith("tcp://")
    assert reply.provenance["reused_tokens"] == 144
    reply.assert_equals(team.models.expected(BASE, BASE, before, EMPTY_SPAN))
