"""Two tensor-parallel ranks: both do what the first one decided, or both prefill in full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from breaking import BROKEN_BLOCK, NUM_BROKEN
from engine_parts import (
    CPU,
    ENV,
    Answer,
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
from forked import BEFORE
from stalling import StallingWorker
from teams import BASE, NUM_LAYERS, WITH_LORA, Checkpoints, Team, random_correction, team_of

from benchmarks.random_adapters import write_adapter
from cachetree.cache import Cache
from cachetree.config import CacheConfig
from cachetree.ids import EMPTY_SPAN, Span
from sglang_droidspeak.fleet import servers
from sglang_droidspeak.fleet.servers import free_port, running
from sglang_droidspeak.start.config import at_rank
from tools.merge import merge_folder

pytestmark = pytest.mark.server

NUM_RANKS = 2
DEADLINE_S = 3.0
READER = "reader"
LATE, NEVER = "late", "never"
"""Models of two workers: the second rank of `late` never sends its last layer, that of `never`
sends nothing."""
NUM_STALLED = 330
CORRECTED, E_MAP = Span(3, 5), random_correction()
"""A block of the reader's profile, and what corrects E before it."""
ADAPTERS = {"wide": {"rank": 8}, "upper": {"rank": 4, "layers": (4, 5), "seed": 1}}
TP = {**CPU, "tp-size": NUM_RANKS}
ENV_OF_RANKS = {
    **ENV,
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    BEFORE: str(Path(__file__).with_name("breaking.py")),
}


def is_advertised(team: Team, tokens: list[int]) -> bool:
    """Return whether every rank offers its part of the prompt's KV to peers."""
    pages = page_hashes(tokens)
    for rank in range(NUM_RANKS):
        peer = at_rank(team.addresses[0], rank)
        family = family_of(team.models.whole[BASE], NUM_RANKS, rank)
        with Cache(family, CacheConfig(peers=(peer,), serves=False)) as cache:
            assert cache.wait_ready(20)
            eventually(lambda: any(it.num_pages == len(pages) for it in cache.match(pages)))
    return True


@contextlib.contextmanager
def stalling(model: Path, name: str, num_unsent: int, seed: int) -> Iterator[str]:
    """Run a worker of two ranks, and yield its address."""
    port, tokens = free_port(NUM_RANKS), prompt(NUM_STALLED, seed)
    with contextlib.ExitStack() as stack:
        for rank in range(NUM_RANKS):
            worker = StallingWorker(
                family_of(model, NUM_RANKS, rank),
                name,
                tokens,
                num_unsent=num_unsent if rank else 0,
                listen=f"tcp://127.0.0.1:{port + rank}",
            )
            stack.enter_context(worker)
        yield f"tcp://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> Iterator[Team]:
    """Run a base with adapters, and a fine-tune in another server that reads from the base."""
    models = Checkpoints.write(tmp_path_factory.mktemp("tp"), ADAPTERS, READER)
    base, address = models.whole[BASE], free_address(NUM_RANKS)
    profile = models.profile(BASE, READER, {CORRECTED: E_MAP})
    with (
        stalling(base, LATE, 1, seed=600) as late,
        stalling(base, NEVER, NUM_LAYERS, seed=601) as never,
    ):
        server = models.server(
            BASE,
            options=TP | WITH_LORA | {"tp-size": NUM_RANKS},
            adapters=models.adapters,
            gate="none",
            capture_layers=[*range(1, NUM_LAYERS)],
            host_gb=0.25,
            listen=address,
        )
        reader = models.server(
            READER,
            options=TP,
            gate="none",
            host_gb=0,
            peers=[address, late, never],
            profiles=[profile],
            fetch_deadline_s=DEADLINE_S,
        )
        with team_of(models, server, reader, env=ENV_OF_RANKS) as team:
            yield team


CASES = [(BASE, "wide", Span(2, 5)), ("wide", "upper", Span(1, 4)), ("wide", BASE, Span(0, 3))]


@pytest.mark.parametrize(("sender", "receiver", "block"), CASES)
def test_block_equals_the_oracle(team, sender, receiver, block):
    tokens = prompt(200, seed=CASES.index((sender, receiver, block)))
    team.assert_block_equals_the_oracle(sender, receiver, tokens, block)


def test_requests_of_one_batch_do_not_touch_each_other(team):
    blocks = [Span(2, 5), Span(0, 3), EMPTY_SPAN]
    team.assert_batch_equals_the_oracle([BASE, *ADAPTERS], blocks, num_reading=3, num_plain=2)


def test_the_first_of_a_burst_leads(team):
    team.assert_the_first_of_a_burst_leads()


def test_an_adapter_that_is_loaded_later_joins(team, tmp_path):
    tokens = prompt(200, seed=505)
    team.ask(BASE, tokens, max_new_tokens=1)
    folder = write_adapter(
        tmp_path / "new", team.models.whole[BASE], rank=8, layers=(3, 4, 5), seed=2
    )
    load_adapter(team.servers[BASE], "new", folder)
    merge_folder(team.models.whole[BASE], folder, tmp_path / "merged")
    reply = answer(team.servers[BASE], tokens, lora_path="new")
    assert (reply.provenance["outcome"], reply.provenance["block"]) == ("reused", [3, 6])
    reply.assert_equals(
        oracle(
            tmp_path / "merged",
            tmp_path / "merged",
            tokens,
            block=EMPTY_SPAN,
            num_reused=whole_pages(len(tokens)),
            max_new=12,
        )
    )


def test_each_rank_has_its_shard_back_from_host_memory(team):
    tokens = prompt(200, seed=506)
    first = team.ask(BASE, tokens)
    assert is_advertised(team, tokens)
    team.servers[BASE].flush()
    reply = team.ask(BASE, tokens)
    provenance = reply.provenance
    assert (provenance["outcome"], provenance["location"], provenance["exact"]) == (
        "own",
        "local",
        True,
    )
    assert reply.ids == first.ids
    assert reply.logprobs == pytest.approx(first.logprobs, abs=2e-4)


def test_each_rank_fetches_its_shard_from_its_own_peer(team):
    tokens = prompt(200, seed=504)
    team.ask(BASE, tokens, max_new_tokens=1)
    assert is_advertised(team, tokens)
    # The reader's own peers are told at the same time as these were.
    reply = eventually(lambda: found_by(team, tokens, Span(2, 5)))
    provenance = reply.provenance
    assert provenance["location"] == team.addresses[0]
    reply.assert_equals(team.models.expected(READER, BASE, tokens, Span(2, 5)))
    # Half of E too: what both ranks fetch is E once, as a server with one rank fetches it.
    shard, whole = (family_of(team.models.whole[BASE], size) for size in (NUM_RANKS, 1))
    assert NUM_RANKS * shard.e_page_bytes == whole.e_page_bytes
    page_bytes = provenance["loaded_layers"] * shard.kv_page_bytes + shard.e_page_bytes
    assert provenance["fetched_bytes"] == len(page_hashes(tokens)) * page_bytes


def test_each_rank_corrects_e_that_all_put_together(team):
    tokens = prompt(200, seed=509)
    team.ask(BASE, tokens, max_new_tokens=1)
    assert is_advertised(team, tokens)
    reply = eventually(lambda: found_by(team, tokens, CORRECTED))
    assert reply.provenance["e_corrected"]
    corrected = team.models.expected(READER, BASE, tokens, CORRECTED, correction=E_MAP)
    reply.assert_equals(corrected)
    plain = team.models.expected(READER, BASE, tokens, CORRECTED)
    assert reply.logprobs != pytest.approx(plain.logprobs, abs=2e-3), "not corrected"


def test_where_one_rank_cannot_begin_to_recompute_all_prefill_in_full(team):
    """No rank waits in a layer for another rank that does not come there."""
    tokens = prompt(NUM_BROKEN + 10, seed=507)
    alone = team.ask(READER, tokens, droidspeak={"mode": "off"})
    team.servers[READER].flush()
    team.ask(BASE, tokens, max_new_tokens=1)
    assert is_advertised(team, tokens)
    outcomes = ("fallback: FetchError", "reused")
    reply = eventually(lambda: found_by(team, tokens, Span(2, 5), outcomes))
    assert reply.provenance["outcome"] == "fallback: FetchError"
    assert reply.ids == alone.ids
    assert reply.logprobs == pytest.approx(alone.logprobs, abs=2e-4)
    assert team.ask(READER, prompt(100, seed=701)).provenance["outcome"] == "no_match"


def test_all_ranks_keep_approximate_kv_apart(team):
    tokens = prompt(200, seed=508)
    team.ask(BASE, tokens, max_new_tokens=1)
    assert is_advertised(team, tokens)
    read = eventually(lambda: approximate(team, tokens))
    read.assert_equals(team.models.expected(READER, BASE, tokens, Span(2, 3)))
    for _ in range(2):
        alone = team.ask(READER, tokens, droidspeak={"mode": "off"})
        assert alone.provenance["exact"]
        alone.assert_equals(team.models.expected(READER, READER, tokens, EMPTY_SPAN))
    team.servers[READER].flush()


def approximate(team: Team, tokens: list[int]) -> Answer | None:
    reply = team.ask(READER, tokens)
    if not reply.provenance["exact"]:
        return reply
    team.servers[READER].flush()
    return None


def found_by(team, tokens, block, outcomes=("reused",)):
    reply = team.receive(READER, BASE, tokens, block)
    team.servers[READER].flush()
    return reply if reply.provenance["outcome"] in outcomes else None


def test_after_an_update_all_ranks_are_the_model_that_was_written(team):
    """Each rank fetches its shard of what the base's server computed: KV of the same model now."""
    tokens = prompt(200, seed=510)
    first = team.ask(BASE, tokens)
    assert is_advertised(team, tokens)
    own = eventually(lambda: own_kv_after(team, BASE, tokens))
    assert own.provenance["sender"] == own.provenance["receiver"]
    assert (own.provenance["exact"], own.provenance["location"]) == (True, team.addresses[0])
    assert own.ids == first.ids
    assert own.logprobs == pytest.approx(first.logprobs, abs=2e-4)
    update(team, READER)
    reply = eventually(lambda: found_by(team, tokens, Span(2, 5)))
    reply.assert_equals(team.models.expected(READER, BASE, tokens, Span(2, 5)))


def own_kv_after(team: Team, model: str, tokens: list[int]) -> Answer | None:
    """The reader's answer with KV of its new model, once its peers are known to have it."""
    update(team, model)
    reply = team.ask(READER, tokens)
    return reply if reply.provenance["outcome"] == "reused" else None


def update(team: Team, model: str) -> None:
    """Put another model's weights into the reader's server. It flushes what it has."""
    server, folder = team.servers[READER], str(team.models.whole[model])
    body = {"model_path": folder, "flush_cache": True}
    reply = requests.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)
    assert reply.json()["success"], reply.text
    unsettled = ("reading_weights", "weights_updated")
    plain = prompt(40, seed=511)
    eventually(lambda: team.ask(READER, plain).provenance["outcome"] not in unsettled)


@pytest.mark.parametrize(("name", "seed"), [(LATE, 600), (NEVER, 601)])
def test_where_one_rank_lacks_its_part_all_prefill_in_full(team, name, seed):
    """The part goes missing while the request waits, or after all ranks have admitted it."""
    tokens = prompt(NUM_STALLED, seed)
    alone = team.ask(READER, tokens, droidspeak={"mode": "off"})
    team.servers[READER].flush()
    reply = team.ask(READER, tokens, droidspeak={"sender": name, "block": "1:5"})
    assert reply.provenance["outcome"].startswith("fallback: ")
    is_admitted = reply.provenance["fetched_bytes"] > 0
    assert (is_admitted, reply.meta["cached_tokens"]) == (name == LATE, 0)
    assert reply.ids == alone.ids
    assert reply.logprobs == pytest.approx(alone.logprobs, abs=2e-4)
    assert team.ask(READER, prompt(100, seed=700)).provenance["outcome"] == "no_match"


def test_a_rank_that_fails_within_a_layer_ends_the_server_at_once(tmp_path):
    """The other rank would wait for it in the layer, and SGLang's watchdog would need minutes to
    notice."""
    models = Checkpoints.write(tmp_path, {"wide": {"rank": 8}})
    spec = models.server(
        BASE,
        options=TP | WITH_LORA | {"tp-size": NUM_RANKS},
        adapters=models.adapters,
        gate="none",
        capture_layers=[BROKEN_BLOCK.start],
        host_gb=0,
    )
    tokens = prompt(200, seed=1)
    with running(spec, folder=tmp_path / "logs", env=ENV_OF_RANKS) as (server,):
        answer(server, tokens, max_new_tokens=1)
        controls = models.controls(BASE, BROKEN_BLOCK)
        with pytest.raises(requests.RequestException):
            answer(server, tokens, lora_path="wide", droidspeak=controls, timeout_s=60)
        eventually(lambda: not server.is_alive, 60)
        log = server.log.read_text()
    assert "rank 1 failed within a layer, where the other ranks wait for it" in log
    assert "this rank has no memory for a layer" in log


@pytest.mark.slow
def test_no_rank_touches_sglangs_tree_alone(tmp_path):
    """SGLang itself ends a server if its ranks call its tree differently. Here requests wait for
    slots that other requests have, and their pages are evicted meanwhile."""
    models = Checkpoints.write(tmp_path, {"wide": {"rank": 8}})
    spec = servers.ServerSpec(
        model=models.whole[BASE],
        options=TP | WITH_LORA | {"tp-size": NUM_RANKS, "max-total-tokens": 1536},
        adapters=models.adapters,
        droidspeak={
            "gate": "none",
            "capture_layers": [2],
            "host_gb": 0,
            "http": f"127.0.0.1:{free_port()}",
        },
    )
    tokens = [prompt(300, seed=800 + i) for i in range(4)]
    controls = models.controls(BASE, Span(2, 5))
    env = ENV_OF_RANKS | {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with running(spec, folder=tmp_path, env=env) as (server,), ThreadPoolExecutor(8) as pool:
        for sequence in tokens:
            answer(server, sequence, max_new_tokens=1)
        asked = [
            pool.submit(answer, server, it, lora_path="wide", droidspeak=controls)
            for it in (*tokens, *tokens)
        ]
        outcomes = {it.result().provenance["outcome"] for it in asked}
        assert "reused" in outcomes, outcomes
        assert answer(server, prompt(100, seed=810)).provenance["outcome"] == "no_match"
        assert "Rank consensus checker is enabled" in server.log.read_text()
