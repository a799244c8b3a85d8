"""Servers of a family that stores KV and E in eight bits: fewer bytes, and nearly the same
answers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import msgspec
import pytest
from engine_parts import CPU, ENV, answer, eventually, family_of, whole_pages
from forked import ServerSpec
from shipped import DATA, SHIPPED, by_context, context_prompt, prompt_of

from cachetree import Cache, CacheConfig
from cachetree.checkpoint.family import Codec
from profiles.data.metrics import Metric, quality
from profiles.data.records import read_records
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = pytest.mark.server

PAIR = SHIPPED[0]
FAMILY = family_of(PAIR.sender.path)
ENCODED = msgspec.structs.replace(FAMILY, codec=Codec.INT8)
LISTEN = f"tcp://127.0.0.1:{free_port()}"
DOCUMENTS = by_context(read_records(DATA / "held_out.jsonl"))[:6]
LEAST_F1 = 0.85
"""Least F1. The receiver's own is 0.99. If it reads the sender's KV in all layers, it is 0.17."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    shared = {"codec": "int8", "profiles": [str(PAIR.profile)]}
    sender = ServerSpec(
        model=PAIR.sender.path,
        name="sender",
        options=CPU,
        droidspeak={**shared, "listen": LISTEN, "host_gb": 0.25},
    )
    receiver = ServerSpec(
        model=PAIR.receiver.path,
        name="receiver",
        options=CPU,
        droidspeak={**shared, "peers": [LISTEN], "host_gb": 0},
    )
    logs = tmp_path_factory.mktemp("encoded")
    with running(sender, receiver, folder=logs, env=ENV) as (s, r):
        yield s, r


def test_another_models_cache_in_a_third_of_the_bytes(servers):
    sender, receiver = servers
    qualities = []
    for context, records in DOCUMENTS:
        text = context_prompt(context)
        (tokens,) = sender.post("/tokenize", prompt=[text])["tokens"]
        sender.generate(tokens, max_new_tokens=1)
        for record in records:
            prompt = prompt_of(record)
            reply = eventually(lambda prompt=prompt: is_reused(it := ask(receiver, prompt)) and it)
            provenance = reply["meta_info"]["droidspeak"][0]
            assert not provenance["exact"] and provenance["block"] == [2, 5]
            num_pages = provenance["reused_tokens"] // FAMILY.page_size
            fetched = {
                family: num_pages * (9 * family.kv_page_bytes + family.e_page_bytes)
                for family in (FAMILY, ENCODED)
            }
            assert provenance["fetched_bytes"] == fetched[ENCODED] < fetched[FAMILY] / 3
            qualities.append(quality(Metric.F1, reply["text"], record.answers))
    assert fmean(qualities) > LEAST_F1


def is_reused(reply: dict) -> bool:
    return reply["meta_info"]["droidspeak"][0]["outcome"] == "reused"


def ask(server: Server, prompt: str) -> dict:
    """Ask with a named block, because a busy machine may predict that a full prefill of so few
    tokens is faster."""
    server.flush()
    return server.generate(prompt, max_new_tokens=8, droidspeak={"block": "2:5"})


def test_its_own_cache_comes_back_approximate_and_says_so(servers):
    sender, _ = servers
    (tokens,) = sender.post("/tokenize", prompt=[context_prompt(DOCUMENTS[0][0])])["tokens"]
    sender.flush()
    first = answer(sender, tokens, droidspeak={"mode": "off"})
    assert first.provenance["exact"]
    sender.flush()
    again = eventually(lambda: (it := answer(sender, tokens)).provenance["outcome"] == "own" and it)
    assert again.provenance["reused_tokens"] == whole_pages(len(tokens))
    assert again.provenance["location"] == "local"
    assert not again.provenance["exact"]
    assert again.logprobs[0] == pytest.approx(first.logprobs[0], abs=0.2)


def test_a_family_with_another_codec_is_refused_by_name(servers):
    with Cache(FAMILY, CacheConfig(peers=(LISTEN,), serves=False)) as plain:
        assert not plain.wait_ready(20)
        (peer,) = plain.status().peers
        assert peer.state == "refused"
        assert "codec is" in peer.error and "int8" in peer.error
    with Cache(ENCODED, CacheConfig(peers=(LISTEN,), serves=False)) as encoded:
        assert encoded.wait_ready(20)
