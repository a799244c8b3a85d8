"""Every supported family besides those of test_exactness: one block, against the oracle."""

from __future__ import annotations

import pytest
from engine_parts import answer, prompt
from server_parts import servers

from cachetree.ids import Span
from profiles.random_models import shape, write_models

FAMILIES = ["mistral", "qwen2", "phi3", "mixtral"]
FAMILIES += ["arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"]
pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_block_equals_the_oracle(family, tmp_path):
    config = shape(family, layers=4, hidden=256, heads=4, kv_heads=2)
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    models = write_models(tmp_path, config, ["sender", "receiver"])
    tokens = prompt(200, seed=1)
    with servers(tmp_path, models, {"capture_layers": [1]}) as pair:
        pair.send(tokens)
        for text, block in (("1:3", Span(1, 3)), ("none", Span(0, 0))):
            reply = answer(pair.receiver, tokens, droidspeak={"block": text})
            assert reply.provenance["outcome"] == "reused"
            reply.assert_equals(pair.expected(tokens, block))
