"""Adapters in one server whose profiles say what is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import msgspec
import pytest
from engine_parts import SLOW_DEVICE, Answer, answer, profile_of, prompt, whole_pages
from forked import ServerSpec
from lora_parts import BASE, WITH_LORA, Checkpoints

from cachetree.ids import EMPTY_SPAN
from cachetree.planning.profile import BlockQuality, write_profile
from sglang_droidspeak.fleet.servers import Server, running

pytestmark = pytest.mark.server

BLOCK = BlockQuality(start=2, stop=4, quality=0.9)
"""Of every profile: E is needed at 2, and at 4 from which `upper` differs."""


@dataclass(frozen=True)
class Team:
    server: Server
    models: Checkpoints

    def ask(self, name: str, tokens: list[int], **options) -> Answer:
        lora = {} if name == BASE else {"lora_path": name}
        return answer(self.server, tokens, **lora, **options)

    def assert_recomputed(self, sender: str, receiver: str, tokens: list[int]) -> None:
        controls = {"sender": self.models.model_id(sender)}
        reply = self.ask(receiver, tokens, droidspeak=controls)
        told = reply.provenance
        assert (told["outcome"], told["location"], told["block"]) == ("reused", "pool", [2, 4])
        reply.assert_equals(self.models.expected(receiver, sender, tokens, BLOCK.block))


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("profiled")
    made = {
        "first": {"rank": 8},
        "second": {"rank": 8, "seed": 1},
        "upper": {"rank": 8, "layers": (4, 5), "seed": 3},
    }
    models = Checkpoints.write(folder, made)
    (folder / "profiles").mkdir()
    for sender, receiver in permutations((BASE, *made), 2):
        if {sender, receiver} != {BASE, "upper"}:
            profile = profile_of(models.identity(sender), models.identity(receiver))
            profile = msgspec.structs.replace(profile, blocks=(BLOCK,), recommended=BLOCK)
            write_profile(profile, folder / "profiles" / f"{sender}-{receiver}.json")
    spec = ServerSpec(
        model=models.whole[BASE],
        options=WITH_LORA | {"max-loras-per-batch": 4},
        adapters=models.adapters,
        droidspeak={"host_gb": 0, "profiles": [str(folder / "profiles")]},
    )
    with running(spec, folder=folder / "logs", env=SLOW_DEVICE) as (server,):
        yield Team(server, models)


def test_what_is_lossless_hands_it_on(team: Team) -> None:
    """Below layer 4 what the base had is copied, and from there on it is made anew."""
    tokens = prompt(200, seed=10)
    team.ask(BASE, tokens, max_new_tokens=1)
    read = team.ask("upper", tokens, max_new_tokens=1)
    assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", True)
    team.assert_recomputed("upper", "second", tokens)


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
