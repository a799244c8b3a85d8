"""Every supported family besides those of test_exactness: one block, against the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_parts import CPU, ENV, Watcher, answer, oracle, prompt, whole_pages
from forked import ServerSpec

from cachetree.ids import Span
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import free_port, running

FAMILIES = ["mistral", "qwen2", "phi3", "mixtral"]
FAMILIES += ["arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"]
pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_block_equals_the_oracle(family: str, tmp_path: Path) -> None:
    config = shape(family, layers=4, hidden=256, heads=4, kv_heads=2)
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    sender, receiver = write_models(tmp_path, config, ["sender", "receiver"])
    address = f"tcp://127.0.0.1:{free_port()}"
    specs = (
        ServerSpec(
            model=sender,
            name="sender",
            options=CPU,
            droidspeak={"listen": address, "capture_layers": [1], "host_gb": 0.25},
        ),
        ServerSpec(
            model=receiver,
            name="receiver",
            options=CPU,
            droidspeak={"peers": [address], "gate": "none", "host_gb": 0},
        ),
    )
    tokens = prompt(200, seed=1)
    with running(*specs, folder=tmp_path / "logs", env=ENV) as (s, r):
        watcher = Watcher(receiver, [address])
        try:
            answer(s, tokens, max_new_tokens=1)
            watcher.wait_for(tokens, sender)
        finally:
            watcher.close()
        for text, block in (("1:3", Span(1, 3)), ("none", Span(0, 0))):
            reply = answer(r, tokens, droidspeak={"block": text})
            assert reply.provenance["outcome"] == "reused"
            expected = oracle(
                receiver,
                sender,
                tokens,
                block=block,
                num_reused=whole_pages(len(tokens)),
                max_new=12,
            )
            reply.assert_equals(expected)
