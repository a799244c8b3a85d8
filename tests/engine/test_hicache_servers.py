"""Two servers that share nothing but the directory of HiCache's file backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_parts import (
    CPU,
    PAGE,
    SLOW_DEVICE,
    Answer,
    answer,
    eventually,
    oracle,
    page_hashes,
    profile_of,
    prompt,
    whole_pages,
)
from forked import ServerSpec

from benchmarks.oracle import Generated
from cachetree.checkpoint.identity import read_model_identity
from cachetree.ids import Span
from cachetree.planning.profile import write_profile
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, running

pytestmark = pytest.mark.server

LAYERS = 4
BLOCK, ALL = Span(2, 3), Span(0, LAYERS)
MAX_NEW = 12


def ask_sender(server: Server, tokens: list[int], store: Path) -> Answer:
    """Its answer, once KV of all layers and E of one are stored."""
    num_before = len(list(store.glob("*.bin")))
    reply = answer(server, tokens)
    least = num_before + len(tokens) // PAGE * (LAYERS + 1)
    eventually(lambda: len(list(store.glob("*.bin"))) >= least)
    return reply


def ask_both(
    sender: Server, receiver: Server, store: Path, seed: int, *, damaged: str = ""
) -> tuple[list[int], Answer]:
    """A document that the sender has read and stored, and the receiver's answer to it.

    Another one is tried where the directory took longer to answer than a request waits for it, as
    it may on a busy machine: the receiver has then read that document itself.
    """
    for attempt in range(5):
        tokens = prompt(300, seed=seed + 100 * attempt)
        assert ask_sender(sender, tokens, store).provenance["outcome"] == "no_match"
        for file in store.glob(damaged) if damaged else ():
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        reply = answer(receiver, tokens)
        if reply.provenance["outcome"] != "no_match":
            break
    return tokens, reply


def test_what_one_server_stores_another_one_reuses(tmp_path: Path) -> None:
    config = shape("llama", layers=LAYERS, hidden=256, heads=4, kv_heads=2)
    sender_model, receiver_model = write_models(tmp_path, config, ["sender", "receiver"])
    sender_id, receiver_id = map(read_model_identity, (sender_model, receiver_model))
    profile = tmp_path / "pair.json"
    write_profile(profile_of(sender_id, receiver_id), profile)
    store = tmp_path / "store"
    settings = {
        "profiles": [str(profile)],
        "hicache_backend": "file",
        "hicache_config": {"file_storage_path": str(store)},
        "host_gb": 0.05,
    }
    specs = [
        ServerSpec(model=model, name=name, options=CPU, droidspeak=settings)
        for name, model in (("sender", sender_model), ("receiver", receiver_model))
    ]

    def expected(tokens: list[int], block: Span) -> Generated:
        return oracle(
            receiver_model,
            sender_model,
            tokens,
            block=block,
            num_reused=whole_pages(len(tokens)),
            max_new=MAX_NEW,
        )

    with running(*specs, folder=tmp_path / "logs", env=SLOW_DEVICE) as (sender, receiver):
        tokens, reply = ask_both(sender, receiver, store, seed=5)
        assert reply.provenance["outcome"] == "reused"
        assert reply.provenance["location"] == "hicache"
        assert reply.provenance["sender"] == sender_id.model_id
        assert reply.provenance["block"] == [BLOCK.start, BLOCK.stop]
        assert reply.provenance["reused_tokens"] == whole_pages(len(tokens))
        reply.assert_equals(expected(tokens, BLOCK))
        # The receiver's own KV of that prompt is approximate, and is not stored.
        page = page_hashes(tokens)[0].hex()
        assert {file.name.split("-")[2] for file in store.glob(f"*-{page}-*")} == {
            sender_id.model_id
        }

        # Another tenant finds nothing, and its answer is the receiver's own.
        salted = answer(receiver, tokens, cache_salt="another")
        assert salted.provenance["outcome"] == "no_match"
        salted.assert_equals(expected(tokens, ALL))

        # What was damaged since is a full prefill.
        damaged_files = f"*{sender_id.model_id}*-kv1_*.bin"
        other, damaged = ask_both(sender, receiver, store, seed=6, damaged=damaged_files)
        assert damaged.provenance["outcome"] == "fallback: StaleEntry"
        damaged.assert_equals(expected(other, ALL))
