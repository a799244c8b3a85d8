"""Answers from KV and E that come from a disk, from a cluster's storage, or from the slots of
another adapter equal the oracle's: those of a slow computation without servers.

The plans correct E. So an answer is right only if E arrived as it was stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from engine_parts import PAGE, SLOW_DEVICE, Answer, eventually, page_hashes, prompt, whole_pages
from teams import BASE, NUM_LAYERS, WITH_LORA, Checkpoints, Team, random_correction, team_of

from cachetree.ids import EMPTY_SPAN, Span

pytestmark = pytest.mark.server

TUNED = "tuned"
BLOCK, BY = Span(2, 4), random_correction()
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"rank": 8},
    "second": {"rank": 8, "seed": 1},
    "upper": {"rank": 8, "layers": (4, 5), "seed": 3},
}
TOKENS = prompt(200, seed=17)
OFF = {"mode": "off"}


def assert_corrected(reply, models, sender, receiver, tokens=TOKENS):
    provenance = reply.provenance
    assert (provenance["outcome"], provenance["e_corrected"], provenance["exact"]) == (
        "reused",
        True,
        False,
    )
    assert provenance["sender"] == models.model_id(sender)
    assert provenance["block"] == [BLOCK.start, BLOCK.stop]
    assert provenance["reused_tokens"] == whole_pages(len(tokens))
    plain = models.expected(receiver, sender, tokens, BLOCK)
    corrected = models.expected(receiver, sender, tokens, BLOCK, correction=BY)
    assert abs(corrected.logprobs[0] - plain.logprobs[0]) > 1e-3
    reply.assert_equals(corrected)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints.write(tmp_path_factory.mktemp("models"), ADAPTERS, TUNED)


@pytest.fixture(scope="module")
def profile(models: Checkpoints) -> str:
    return models.profile(BASE, TUNED, {BLOCK: BY}, recommended=BLOCK)


def test_files_of_a_server_are_read_by_the_next_one_and_by_itself_after_a_restart(
    models, profile, tmp_path
):
    disk = tmp_path / "disk"
    settings = {"disk_path": str(disk), "disk_gb": 0.1, "profiles": [profile], "host_gb": 0.05}
    kv_heads = 2
    stored_bytes = whole_pages(200) * 4 * (NUM_LAYERS * 2 * kv_heads * 64 + 256)

    def num_bytes() -> int:
        return sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())

    with team_of(models, models.server(BASE, **settings)) as team:
        first = team.ask(BASE, TOKENS)
        eventually(lambda: num_bytes() >= stored_bytes)
    with team_of(models, models.server(TUNED, **settings)) as team:
        assert_corrected(team.ask(TUNED, TOKENS), models, BASE, TUNED)
    with team_of(models, models.server(BASE, **settings)) as team:
        again = team.ask(BASE, TOKENS)
    provenance = again.provenance
    assert (provenance["outcome"], provenance["exact"]) == ("own", True)
    assert provenance["reused_tokens"] == whole_pages(200)
    assert again.ids == first.ids


def test_servers_share_a_directory_of_hicache(models, profile, tmp_path):
    store = tmp_path / "store"
    settings = {
        "profiles": [profile],
        "hicache_backend": "file",
        "hicache_config": {"file_storage_path": str(store)},
        "host_gb": 0.05,
    }
    with team_of(models, *(models.server(it, **settings) for it in (BASE, TUNED))) as team:
        tokens, reply = ask_both(team, store, seed=5)
        assert reply.provenance["location"] == "hicache"
        assert_corrected(reply, models, BASE, TUNED, tokens)
        # The receiver's own KV of that prompt is approximate, and is not stored.
        files = store.glob(f"*-{page_hashes(tokens)[0].hex()}-*")
        assert {it.name.split("-")[2] for it in files} == {models.model_id(BASE)}

        other_tenant = team.ask(TUNED, tokens, cache_salt="another")
        assert other_tenant.provenance["outcome"] == "no_match"
        other_tenant.assert_equals(models.expected(TUNED, TUNED, tokens, EMPTY_SPAN))

        of_one_layer = f"*{models.model_id(BASE)}*-kv1_*.bin"
        tokens, reply = ask_both(team, store, seed=6, damaged=of_one_layer)
        assert reply.provenance["outcome"] == "fallback: StaleEntry"
        reply.assert_equals(models.expected(TUNED, TUNED, tokens, EMPTY_SPAN))


def ask_both(team: Team, store: Path, seed: int, damaged: str = "") -> tuple[list[int], Answer]:
    """Ask about a document that the sender has read and stored. Return the document and the
    receiver's answer.

    If a busy machine's directory answers later than a request waits, the receiver reads the
    document itself. Then another document is tried.
    """
    for attempt in range(5):
        tokens = prompt(300, seed=seed + 100 * attempt)
        least = len(list(store.glob("*.bin"))) + len(tokens) // PAGE * (NUM_LAYERS + 1)
        assert team.ask(BASE, tokens).provenance["outcome"] == "no_match"
        eventually(lambda least=least: len(list(store.glob("*.bin"))) >= least)
        for file in store.glob(damaged) if damaged else ():
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        reply = team.ask(TUNED, tokens)
        if reply.provenance["outcome"] != "no_match":
            break
    return tokens, reply


@pytest.fixture(scope="module")
def adapters(models: Checkpoints) -> Iterator[Team]:
    """Start a server with a profile of every two models. The profile of `first` and `second`
    corrects E."""
    profiles = [
        models.profile(sender, receiver, {BLOCK: BY}, recommended=BLOCK)
        for sender, receiver in permutations((BASE, *ADAPTERS), 2)
        if {sender, receiver} != {BASE, "upper"}
    ]
    options = WITH_LORA | {"max-loras-per-batch": 4}
    spec = models.server(
        BASE, options=options, adapters=models.adapters, host_gb=0, profiles=profiles
    )
    with team_of(models, spec, env=SLOW_DEVICE) as team:
        yield team


def test_adapter_reads_corrected_e_of_another_in_the_pool(adapters):
    adapters.ask("first", TOKENS, max_new_tokens=1)
    reply = adapters.ask("second", TOKENS, droidspeak=adapters.models.controls("first", BLOCK))
    assert reply.provenance["location"] == "pool"
    assert_corrected(reply, adapters.models, "first", "second")


def test_adapter_that_read_its_base_exactly_hands_it_on(adapters):
    """Below layer 4, `upper` copies the base's KV. From layer 4 on it computes its own."""
    tokens = prompt(200, seed=10)
    adapters.ask(BASE, tokens, max_new_tokens=1)
    read = adapters.ask("upper", tokens, max_new_tokens=1)
    assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", True)
    controls = adapters.models.controls("upper", BLOCK)
    reply = adapters.ask("second", tokens, droidspeak=controls)
    assert reply.provenance["location"] == "pool"
    assert_corrected(reply, adapters.models, "upper", "second", tokens)


@pytest.mark.parametrize("key", [None, "a tenant"])
def test_approximate_kv_of_an_adapter_has_a_namespace_of_its_own(adapters, key):
    tokens = prompt(200, seed=30)
    adapters.ask(BASE, tokens, max_new_tokens=1, extra_key=key)
    read = adapters.ask("first", tokens, extra_key=key)
    assert (read.provenance["outcome"], read.provenance["exact"]) == ("reused", False)
    assert adapters.ask("first", tokens, extra_key=key).meta["cached_tokens"] == whole_pages(200)
    alone = adapters.ask("first", tokens, extra_key=key, droidspeak=OFF)
    assert (alone.meta["cached_tokens"], alone.provenance["exact"]) == (0, True)
    alone.assert_equals(adapters.models.expected("first", "first", tokens, EMPTY_SPAN))
