"""One server with many adapters. Each reads KV that others left in the pool, and answers as without
reuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_parts import (
    answer,
    eventually,
    family_of,
    free_address,
    load_adapter,
    oracle,
    page_hashes,
    prompt,
    whole_pages,
)
from sglang.srt.lora.lora_registry import LoRARef
from teams import BASE, NUM_LAYERS, WITH_LORA, Checkpoints, Team, team_of

from benchmarks.oracle import Generated
from benchmarks.random_adapters import write_adapter
from cachetree.cache import Cache
from cachetree.clock import Deadline
from cachetree.config import CacheConfig
from cachetree.ids import EMPTY_SPAN, Location, ModelId, PageHash, Span
from cachetree.planning.plan import Plan
from tools.merge import merge_folder

pytestmark = pytest.mark.server

ADAPTERS = {
    "wide": {"rank": 8},
    "narrow": {"rank": 4, "modules": ("q_proj", "v_proj"), "seed": 1},
    "mlp": {"rank": 4, "modules": ("gate_proj", "up_proj", "down_proj"), "seed": 2},
    "upper": {"rank": 8, "layers": (4, 5), "seed": 3},
}


@contextmanager
def team_in(folder: Path, **options) -> Iterator[Team]:
    models = Checkpoints.write(folder, ADAPTERS)
    spec = models.server(
        BASE,
        options=WITH_LORA | options,
        adapters=models.adapters,
        gate="none",
        capture_layers=[*range(1, NUM_LAYERS)],
        host_gb=0.25,
        listen=free_address(),
    )
    with team_of(models, spec) as team:
        yield team


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Team]:
    with team_in(tmp_path_factory.mktemp("lora")) as started:
        yield started


CASES = [
    (BASE, "wide", Span(2, 5)),
    ("wide", "narrow", Span(1, 4)),
    ("narrow", BASE, Span(0, 3)),
    ("mlp", "wide", Span(3, 4)),
    (BASE, "mlp", EMPTY_SPAN),
    ("wide", "mlp", Span(0, NUM_LAYERS)),
]


def assert_case_equals_the_oracle(team: Team, sender: str, receiver: str, block: Span) -> None:
    tokens = prompt(200, seed=600 + CASES.index((sender, receiver, block)))
    team.assert_block_equals_the_oracle(sender, receiver, tokens, block)


@pytest.mark.parametrize(("sender", "receiver", "block"), CASES)
def test_block_equals_the_oracle(team, sender, receiver, block):
    assert_case_equals_the_oracle(team, sender, receiver, block)


@pytest.mark.slow
def test_without_the_overlap_schedule(tmp_path):
    with team_in(tmp_path, **{"disable-overlap-schedule": True}) as team:
        for case in CASES:
            assert_case_equals_the_oracle(team, *case)
        assert_batch_equals_the_oracle(team)


def test_decoded_tokens_are_part_of_the_shared_context(team):
    tokens = prompt(150, seed=9)
    spoken = team.ask("wide", tokens, max_new_tokens=60)
    longer = [*tokens, *spoken.ids, *prompt(20, seed=10)]
    num_reused = (len(tokens) + len(spoken.ids) - 1) // 16 * 16
    assert num_reused > len(tokens)
    reply = team.receive("mlp", "wide", longer, Span(2, 5))
    assert reply.provenance["reused_tokens"] == num_reused
    reply.assert_equals(
        team.models.expected("mlp", "wide", longer, Span(2, 5), num_reused=num_reused)
    )


def test_requests_of_one_batch_do_not_touch_each_other(team):
    assert_batch_equals_the_oracle(team)


def assert_batch_equals_the_oracle(team: Team) -> None:
    blocks = [Span(2, 5), Span(0, 3), EMPTY_SPAN, Span(4, 6)]
    team.assert_batch_equals_the_oracle([BASE, *ADAPTERS], blocks, num_reading=10, num_plain=3)


def test_an_adapter_on_upper_layers_reads_the_base_without_a_profile(team):
    """The base also reads the adapter's KV: below the adapter's first layer both are the same
    model."""
    for name, sender in (("upper", BASE), (BASE, "upper")):
        tokens = prompt(200, seed=400 + len(name))
        first = team.ask(sender, tokens, max_new_tokens=1)
        assert first.provenance["outcome"] == "no_match"
        reply = team.ask(name, tokens)
        provenance = reply.provenance
        assert (provenance["outcome"], provenance["location"], provenance["exact"]) == (
            "reused",
            "pool",
            True,
        )
        assert provenance["block"] == [4, 6]
        reply.assert_equals(team.models.expected(name, name, tokens, EMPTY_SPAN))


def test_no_profile_no_reuse(team):
    tokens = prompt(200, seed=500)
    team.ask("wide", tokens, max_new_tokens=1)
    reply = team.ask("narrow", tokens)
    assert reply.provenance["outcome"] == "no_profile"
    reply.assert_equals(team.models.expected("narrow", "narrow", tokens, EMPTY_SPAN))


def test_approximate_pages_are_no_source(team):
    tokens = prompt(200, seed=501)
    team.ask(BASE, tokens, max_new_tokens=1)
    read = team.receive("wide", BASE, tokens, Span(2, 5))
    assert not read.provenance["exact"]
    second = team.receive("narrow", "wide", tokens, Span(2, 5))
    assert second.provenance["outcome"] == "no_match"


def test_tenants_share_nothing(team):
    tokens = prompt(200, seed=502)
    team.ask(BASE, tokens, max_new_tokens=1, extra_key="one")
    for key in ("two", None):
        reply = team.ask("upper", tokens, max_new_tokens=1, extra_key=key)
        assert reply.provenance["outcome"] == "no_match"
    same = team.ask("upper", tokens, max_new_tokens=1, extra_key="one")
    assert same.provenance["outcome"] == "reused"


def test_a_user_of_the_base_leaves_nothing_for_an_adapter(team):
    tokens = prompt(200, seed=510)
    lora_id = LoRARef.deterministic_id("upper", str(team.models.adapters["upper"]))
    team.ask(BASE, tokens, max_new_tokens=1, extra_key=lora_id)
    reply = team.ask("upper", tokens)
    assert (reply.provenance["outcome"], reply.meta["cached_tokens"]) == ("no_match", 0)
    reply.assert_equals(team.models.expected("upper", "upper", tokens, EMPTY_SPAN))


def test_the_first_of_a_burst_leads(team):
    team.assert_the_first_of_a_burst_leads()


def test_other_weights_under_the_same_name_hit_nothing(team, tmp_path):
    tokens = prompt(200, seed=504)

    def load(seed: int) -> None:
        folder = write_adapter(
            tmp_path / str(seed), team.models.whole[BASE], rank=8, layers=(3, 4, 5), seed=seed
        )
        load_adapter(team.servers[BASE], "late", folder)
        merge_folder(team.models.whole[BASE], folder, tmp_path / f"merged-{seed}")

    def whole(seed: int) -> Generated:
        merged = tmp_path / f"merged-{seed}"
        return oracle(merged, merged, tokens, block=EMPTY_SPAN, num_reused=192, max_new=12)

    load(60)
    first = answer(team.servers[BASE], tokens, lora_path="late")
    assert first.provenance["outcome"] == "no_match"
    first.assert_equals(whole(60))
    team.servers[BASE].post("/unload_lora_adapter", lora_name="late")
    load(61)
    second = answer(team.servers[BASE], tokens, lora_path="late")
    assert second.provenance["outcome"] in ("no_match", "no_profile")
    second.assert_equals(whole(61))
    # What the two have in common is found all the same: through the base.
    team.ask(BASE, tokens, max_new_tokens=1)
    team.servers[BASE].post("/unload_lora_adapter", lora_name="late")
    load(62)
    third = answer(team.servers[BASE], tokens, lora_path="late")
    assert (third.provenance["outcome"], third.provenance["block"]) == ("reused", [3, 6])
    third.assert_equals(whole(62))


class Reader:
    """A peer that fetches the entries that a server has stored of its models."""

    def __init__(self, team: Team) -> None:
        self._address = Location(team.addresses[0])
        config = CacheConfig(peers=tuple(team.addresses), serves=False)
        self._cache = Cache(family_of(team.models.whole[BASE]), config)
        assert self._cache.wait_ready(20)

    def kv(self, model: str, tokens: list[int], extra_key: str) -> list[np.ndarray]:
        """Return KV of each layer as numbers. Wait until all whole pages that can be reused are
        stored."""
        pages = page_hashes(tokens[: whole_pages(len(tokens))], extra_key=extra_key)
        eventually(lambda: self._num_pages(model, pages) == len(pages))
        plan = Plan(
            sender=ModelId(model),
            receiver=ModelId(model),
            location=self._address,
            pages=Span(0, len(pages)),
            block=EMPTY_SPAN,
            num_layers=NUM_LAYERS,
        )
        staging = self._cache.fetch(plan, pages, Deadline.after(20))
        for step in plan.steps:
            staging.wait(step)
        layers = [np.frombuffer(b"".join(staging.views(step)), np.float32) for step in plan.steps]
        staging.release()
        return layers

    def _num_pages(self, model: str, pages: list[PageHash]) -> int:
        lengths = (it.num_pages for it in self._cache.match(pages) if it.model == model)
        return max(lengths, default=0)

    def close(self) -> None:
        self._cache.close()


def test_what_is_lossless_is_so_to_the_last_bit(team):
    """The test compares KV, not only answers: of a model that has read another's KV, and of the
    same model alone."""
    tokens = prompt(200, seed=505)
    reader = Reader(team)
    try:
        for name, sender in (("upper", BASE), (BASE, "upper")):
            team.ask(sender, tokens, max_new_tokens=1, extra_key=f"{name} reads")
            read = team.ask(name, tokens, max_new_tokens=1, extra_key=f"{name} reads")
            assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", True)
            team.ask(name, tokens, max_new_tokens=1, extra_key=f"{name} computes")
            reused = reader.kv(team.models.model_id(name), tokens, f"{name} reads")
            own = reader.kv(team.models.model_id(name), tokens, f"{name} computes")
            theirs = reader.kv(team.models.model_id(sender), tokens, f"{name} reads")
            same = [bool((a == b).all()) for a, b in zip(reused, own, strict=True)]
            assert same == [True] * NUM_LAYERS
            shared = [bool((a == b).all()) for a, b in zip(own, theirs, strict=True)]
            assert shared == [True] * 4 + [False] * 2, "the two models differ from layer 4 on"
    finally:
        reader.close()
