"""The extension changes no byte of any answer if no pair is eligible."""

from __future__ import annotations

import pytest
from engine_parts import CPU, ENV, answer, prompt
from forked import ServerSpec

from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import running

pytestmark = pytest.mark.server


def test_outputs_are_byte_identical(tmp_path):
    """One server keeps E of every layer and stores all KV. The other one runs without the
    extension."""
    config = shape("qwen3", layers=4, hidden=256, heads=4, kv_heads=2)
    (model,) = write_models(tmp_path, config, ["model"])
    plain = ServerSpec(model=model, name="plain", options=CPU)
    extended = ServerSpec(
        model=model,
        name="extended",
        options=CPU,
        droidspeak={"listen": "tcp://127.0.0.1:0", "capture_layers": [1, 2, 3], "host_gb": 0.25},
    )
    shared = prompt(150, seed=1)
    prompts = [shared, [*shared, *prompt(60, seed=2)], prompt(40, seed=3), prompt(300, seed=4)]
    with running(plain, extended, folder=tmp_path / "logs", env=ENV) as servers:
        replies = [
            [answer(server, tokens, max_new_tokens=24) for tokens in prompts] for server in servers
        ]
    for without, with_extension in zip(*replies, strict=True):
        assert with_extension.provenance["reused_tokens"] == 0
        assert with_extension.ids == without.ids
        assert with_extension.logprobs == without.logprobs
        assert with_extension.text == without.text
