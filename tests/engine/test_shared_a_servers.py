"""Adapters with one A in one server: A x is kept in place of E, and refreshes come out the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import msgspec
import pytest
from engine_parts import SLOW_DEVICE, Answer, answer, load_adapter, profile_of, prompt, whole_pages
from forked import ServerSpec
from lora_parts import BASE, WITH_LORA, Checkpoints

from cachetree.ids import EMPTY_SPAN
from cachetree.planning.profile import BlockQuality, write_profile
from sglang_droidspeak.fleet.servers import Server, running

pytestmark = pytest.mark.server

RECIPE = BlockQuality(start=2, stop=3, refreshed=(1, 4, 5), quality=0.9)
"""Of every profile: E is needed at 2, and at 4 from which `upper` differs, and less at 1 and 5."""
STRANGER = "stranger"


@dataclass(frozen=True)
class Team:
    server: Server
    models: Checkpoints

    def ask(self, name: str, tokens: list[int], **options) -> Answer:
        lora = {} if name == BASE else {"lora_path": name}
        return answer(self.server, tokens, **lora, **options)

    def assert_refreshed(self, sender: str, receiver: str, tokens: list[int]) -> None:
        controls = {"sender": self.models.model_id(sender)}
        reply = self.ask(receiver, tokens, droidspeak=controls)
        told = reply.provenance
        assert (told["outcome"], told["location"], told["block"]) == ("reused", "pool", [2, 3])
        assert told["low_rank"] == list(RECIPE.refreshed)
        expected = self.models.expected(receiver, sender, tokens, RECIPE.block, *RECIPE.refreshed)
        reply.assert_equals(expected)


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("shared")
    first = folder / "first"
    made = {
        "first": {"rank": 8},
        "second": {"rank": 8, "seed": 1, "a_of": first},
        "partly": {"rank": 8, "modules": ("q_proj", "v_proj"), "seed": 2, "a_of": first},
        "upper": {"rank": 8, "layers": (4, 5), "seed": 3, "a_of": first},
        STRANGER: {"rank": 8, "seed": 4},
    }
    models = Checkpoints.write(folder, made)
    (folder / "profiles").mkdir()
    for sender, receiver in permutations((BASE, *made), 2):
        if {sender, receiver} != {BASE, "upper"}:
            profile = profile_of(models.identity(sender), models.identity(receiver))
            profile = msgspec.structs.replace(profile, blocks=(RECIPE,), recommended=RECIPE)
            write_profile(profile, folder / "profiles" / f"{sender}-{receiver}.json")
    spec = ServerSpec(
        model=models.whole[BASE],
        options=WITH_LORA | {"max-loras-per-batch": 6},
        adapters={name: path for name, path in models.adapters.items() if name != STRANGER},
        droidspeak={"host_gb": 0, "profiles": [str(folder / "profiles")]},
    )
    with running(spec, folder=folder / "logs", env=SLOW_DEVICE) as (server,):
        yield Team(server, models)


def test_it_says_what_it_keeps(team: Team) -> None:
    """In float32 a hidden size of 256 takes 1024 bytes, two A of rank 8 take 64."""
    said = team.server.log.read_text()
    assert "the same A at layers [1, 5]" in said
    assert "2176 bytes per token and not 4096" in said
    assert "recomputed two layers on TorchCpuAttention" in said


CASES = [(BASE, "first"), ("first", "second"), ("partly", BASE), ("second", "partly")]


@pytest.mark.parametrize(("sender", "receiver"), CASES)
def test_refreshed_layers_equal_the_oracle(team: Team, sender: str, receiver: str) -> None:
    tokens = prompt(200, seed=CASES.index((sender, receiver)))
    team.ask(sender, tokens, max_new_tokens=1)
    team.assert_refreshed(sender, receiver, tokens)


def test_what_is_lossless_hands_it_on(team: Team) -> None:
    """Below layer 4 what the base had is copied, and from there on it is made anew."""
    tokens = prompt(200, seed=10)
    team.ask(BASE, tokens, max_new_tokens=1)
    read = team.ask("upper", tokens, max_new_tokens=1)
    assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", True)
    team.assert_refreshed("upper", "second", tokens)


def test_another_a_is_not_refreshed_from_it(team: Team) -> None:
    """And the others go on as before, though the profiles name its pairs."""
    load_adapter(team.server, STRANGER, team.models.adapters[STRANGER])
    for number, (sender, receiver) in enumerate(((BASE, STRANGER), (STRANGER, "first"))):
        tokens = prompt(200, seed=20 + number)
        team.ask(sender, tokens, max_new_tokens=1)
        reply = team.ask(receiver, tokens)
        assert reply.provenance["outcome"] == "no_e"
        own = team.models.expected(receiver, receiver, tokens, EMPTY_SPAN)
        reply.assert_equals(own)
    tokens = prompt(200, seed=22)
    team.ask("first", tokens, max_new_tokens=1)
    team.assert_refreshed("first", "second", tokens)


@pytest.mark.parametrize("key", [None, "a tenant"])
def test_an_adapters_approximate_kv_lies_apart(team: Team, key: str | None) -> None:
    tokens = prompt(200, seed=30)
    team.ask(BASE, tokens, max_new_tokens=1, extra_key=key)
    read = team.ask("first", tokens, extra_key=key)
    assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", False)
    assert team.ask("first", tokens, extra_key=key).meta["cached_tokens"] == whole_pages(200)
    alone = team.ask("first", tokens, extra_key=key, droidspeak={"mode": "off"})
    assert (alone.meta["cached_tokens"], alone.provenance["exact"]) == (0, True)
    alone.assert_equals(team.models.expected("first", "first", tokens, EMPTY_SPAN))


def test_what_is_refreshed_matters(team: Team) -> None:
    """Else the equalities above would say nothing."""
    tokens = prompt(200, seed=0)
    plans = [(), (4,), (1, 5), RECIPE.refreshed]
    answers = [team.models.expected("first", BASE, tokens, RECIPE.block, *it) for it in plans]
    assert len({tuple(round(it, 3) for it in each.logprobs) for each in answers}) == len(plans)
