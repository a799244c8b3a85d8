"""Adapters that act from their invocation on. They are exact, and recompute nothing before the
invocation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import pytest
import requests
import zmq
from engine_parts import eventually, free_address
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch
from teams import (
    BASE,
    INVOCATION,
    WITH_ACTIVATED,
    Checkpoints,
    Team,
    assert_same_answers_without_reuse,
    plain_prompt,
    questions,
    team_of,
)

from benchmarks.oracle import Generated
from benchmarks.random_adapters import activate
from cachetree.ids import EMPTY_SPAN

pytestmark = pytest.mark.server


JUDGE = "judge"


@dataclass(frozen=True)
class Judged(Team):
    """A base, an activated adapter and a plain one in one server."""

    events: zmq.Socket[bytes]
    """SGLang's events, for programs that route by them."""

    def expect(self, tokens: list[int], invoked_at: int) -> Generated:
        """Return the expected answer: the base computes the KV before the invocation, the adapter
        the rest."""
        return self.models.expected(JUDGE, BASE, tokens, EMPTY_SPAN, num_reused=invoked_at)

    def expect_of_base(self, tokens: list[int]) -> Generated:
        return self.models.expected(BASE, BASE, tokens, EMPTY_SPAN)


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Judged]:
    folder = tmp_path_factory.mktemp("activated")
    models = Checkpoints.write(folder, {JUDGE: {"rank": 8}, "other": {"rank": 8, "seed": 5}})
    activate(models.adapters[JUDGE], INVOCATION)
    at = free_address()
    published = json.dumps({"publisher": "zmq", "endpoint": at, "bind": True})
    options = WITH_ACTIVATED | {"max-loras-per-batch": 3, "kv-events-config": published}
    spec = models.server(BASE, options=options, adapters=models.adapters, host_gb=0.25)
    with zmq.Context.instance().socket(zmq.SUB) as events, team_of(models, spec) as team:
        events.subscribe(b"")
        events.connect(at)
        yield Judged(**vars(team), events=events)


def test_it_acts_from_its_invocation_on(team):
    tokens = [*plain_prompt(150, 1), *INVOCATION, *plain_prompt(30, 2)]
    reply = team.ask(JUDGE, tokens)
    assert reply.provenance["outcome"] == "no_match"
    reply.assert_equals(team.expect(tokens, 150))
    whole = team.expect(tokens, 16)
    assert reply.ids != whole.ids or reply.logprobs != pytest.approx(whole.logprobs, abs=1e-3)


def test_what_comes_before_is_read_from_the_base_without_a_profile(team):
    document = plain_prompt(150, 3)
    team.ask(BASE, [*document, 9], max_new_tokens=1)
    tokens = [*document, *INVOCATION, *plain_prompt(30, 4)]
    reply = team.ask(JUDGE, tokens)
    provenance = reply.provenance
    assert (provenance["outcome"], provenance["location"], provenance["exact"]) == (
        "reused",
        "pool",
        True,
    )
    assert (provenance["reused_tokens"], provenance["recomputed_layers"]) == (144, 0)
    reply.assert_equals(team.expect(tokens, 150))


def test_the_base_reads_what_came_before(team):
    document = plain_prompt(150, 5)
    team.ask(JUDGE, [*document, *INVOCATION, *plain_prompt(30, 6)])
    tokens = [*document, *plain_prompt(20, 7)]
    reply = team.ask(BASE, tokens)
    assert reply.provenance["reused_tokens"] == 144
    reply.assert_equals(team.expect_of_base(tokens))


def test_answers_are_the_same_without_reuse(team):
    asked = questions(seed=60)
    answers = assert_same_answers_without_reuse(
        team.servers[BASE],
        team.models,
        "judge",
        asked,
        lambda it: team.ask(BASE, it, max_new_tokens=1),
    )
    outcomes = {case: it.provenance["outcome"] for case, it in answers.items()}
    assert outcomes.pop("never") == "on_device"
    assert set(outcomes.values()) == {"reused"}
    assert [case for case, it in answers.items() if it.provenance["not_invoked"]] == ["never"]


def test_a_later_invocation_makes_what_was_the_adapters_the_bases(team):
    first = [*plain_prompt(100, 8), *INVOCATION, *plain_prompt(40, 9)]
    said = team.ask(JUDGE, first)
    second = [*first, *said.ids, *plain_prompt(40, 10), *INVOCATION, *plain_prompt(10, 11)]
    at = len(second) - 12
    reply = team.ask(JUDGE, second)
    assert reply.provenance["reused_tokens"] <= 96
    reply.assert_equals(team.expect(second, at))


def test_without_an_invocation_it_is_the_base(team):
    """The server has the base's KV on the device already."""
    tokens = plain_prompt(150, 12)
    team.ask(BASE, tokens, max_new_tokens=1)
    reply = team.ask(JUDGE, tokens)
    assert (reply.meta["cached_tokens"], reply.provenance["reused_tokens"]) == (144, 0)
    reply.assert_equals(team.expect_of_base(tokens))


def test_a_pinned_one_leaves_it_and_the_base_a_slot_each(team):
    def load(name: str) -> str:
        asked = {"lora_name": name, "lora_path": str(team.models.adapters["other"]), "pinned": True}
        return requests.post(
            f"{team.servers[BASE].url}/load_lora_adapter", json=asked, timeout=60
        ).text

    assert '"success":true' in load("one")
    assert "judge takes two slots" in load("two")
    team.servers[BASE].post("/unload_lora_adapter", lora_name="one")


def test_events_call_it_by_its_name(team):
    """No event names such a page for the base model, not even for a request with the same
    tokens."""

    def names() -> set[str | None]:
        tokens = [*plain_prompt(90, 50), *INVOCATION, *plain_prompt(20, 51)]
        team.ask(JUDGE, tokens, max_new_tokens=1)
        team.servers[BASE].flush()
        all_names: set[str | None] = set()
        while team.events.poll(500):
            batch = msgspec.msgpack.decode(team.events.recv_multipart()[2], type=KVEventBatch)
            stored = [it for it in batch.events if isinstance(it, BlockStored)]
            all_names |= {it.lora_name for it in stored if it.token_ids[:16] == tokens[:16]}
        return all_names

    assert eventually(names) == {"judge"}


def test_others_in_the_batch_are_not_touched(team):
    invoked = [[*plain_prompt(90 + i, 20 + i), *INVOCATION, *plain_prompt(20, 30)] for i in (0, 40)]
    plain = plain_prompt(120, 40)
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(team.ask, JUDGE, tokens) for tokens in invoked]
        base = pool.submit(team.ask, BASE, plain)
        other = pool.submit(team.ask, "other", plain)
        for tokens, at, reply in zip(invoked, (90, 130), replies, strict=True):
            reply.result().assert_equals(team.expect(tokens, at))
        alone = team.expect_of_base(plain)
        base.result().assert_equals(alone)
        assert other.result().ids != alone.ids
