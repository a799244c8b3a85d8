"""A server tells a router how soon it would serve a prompt, and does as it said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from engine_parts import CPU, ENV, answer, eventually, prompt
from forked import ServerSpec

from cachetree.checkpoint import read_model_identity
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = pytest.mark.server

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"


def asked(server: Server, port: int, tokens: Sequence[int]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/query"
    question = {"model": server.spec.model.name, "token_ids": tokens}
    reply = requests.post(url, json=question, timeout=10)
    assert reply.status_code == 200, reply.text
    ((instance, found),) = reply.json()["default"].items()
    assert instance == server.url
    return found


def test_a_server_says_how_soon_and_by_whom(tmp_path: Path) -> None:
    listen, ports = f"tcp://127.0.0.1:{free_port()}", (free_port(), free_port())
    profile = str(PAIRS / "sender_to_receiver.json")
    peers = [listen, "dns://:secret@127.0.0.1:1"]
    settings = ({"listen": listen}, {"peers": peers, "host_gb": 0, "min_tokens": 16})
    specs = [
        ServerSpec(
            model=model,
            name=model.name,
            options={**CPU, "max-total-tokens": 4096, "served-model-name": model.name},
            droidspeak={"profiles": [profile], "http": port, **told},
        )
        for model, port, told in zip((SENDER, RECEIVER), ports, settings, strict=True)
    ]
    tokens = prompt(257, seed=1)
    sender_id = read_model_identity(SENDER).model_id
    with running(*specs, folder=tmp_path, env=ENV) as (sender, receiver):
        own = [it for it in receiver.log.read_text().splitlines() if "droidspeak: " in it]
        assert any(it.endswith(f"peers: {listen}, dns://127.0.0.1:1") for it in own)
        assert not any("secret" in it for it in own)
        for seed, server in enumerate((sender, receiver) * 2, start=2):
            answer(server, prompt(257, seed), max_new_tokens=1)  # It learns how fast it is.
        before = asked(receiver, ports[1], tokens)
        assert (before["longest_matched"], before["senders"]) == (0, [])
        assert before["full_prefill_s"] > 0

        answer(sender, tokens, max_new_tokens=1)
        eventually(lambda: asked(sender, ports[0], tokens)["CPU"] == 256)
        there = asked(sender, ports[0], tokens)
        assert (there["GPU"], there["longest_matched"]) == (256, 256)
        assert there["full_prefill_s"] < before["full_prefill_s"]

        eventually(lambda: asked(receiver, ports[1], tokens)["senders"])
        (score,) = asked(receiver, ports[1], tokens)["senders"]
        assert (score["sender"], score["location"]) == (sender_id, listen)
        assert (score["matched_tokens"], score["exact"]) == (256, False)
        assert score["bytes"] > 0 and score["seconds"] > 0

        told = answer(receiver, tokens, max_new_tokens=1).provenance
        if told["outcome"] == "reused":
            assert (told["sender"], told["reused_tokens"]) == (sender_id, score["reused_tokens"])
        else:  # On a machine that does other things.
            assert told["outcome"].partition(":")[0] in ("slower", "fallback")
