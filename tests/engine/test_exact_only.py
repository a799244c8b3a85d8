"""Classes without a recompute load exact KV only. Answers are compared with plain SGLang."""

from __future__ import annotations

import json

import pytest
from engine_parts import CPU, PAGE, SLOW_DEVICE, Answer, Watcher, answer, prompt
from forked import ServerSpec
from teams import WITH_LORA

from benchmarks.random_adapters import write_adapter
from cachetree import ConfigError
from cachetree.checkpoint import ModelIdentity
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import free_port, running
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.config import Settings

FAMILIES = {
    "ApertusForCausalLM": "apertus",
    "CohereForCausalLM": "cohere",
    "GemmaForCausalLM": "gemma",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Olmo2ForCausalLM": "olmo2",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
NUM_TOKENS = 200
INVOCATION = [77, 78]


def test_every_class_is_tested():
    assert FAMILIES.keys() == refuse.EXACT_ONLY


@pytest.mark.parametrize("setting", [{"gate": "none"}, {"capture_layers": [1]}], ids=str)
def test_settings_of_blocks_are_refused(setting):
    granite = ModelIdentity(
        architecture="GraniteForCausalLM",
        num_layers=4,
        hidden_size=8,
        num_kv_heads=1,
        head_dim=8,
        rope="",
        tokenizer="",
        num_attention_heads=1,
        weights="",
    )
    refuse.check_blocks(Settings(), granite)
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is .* GraniteForCausalLM cannot"):
        refuse.check_blocks(Settings(**setting), granite)  # type: ignore[arg-type]


@pytest.mark.server
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(it, marks=[] if it == "granite" else [pytest.mark.slow])
        for it in FAMILIES.values()
    ],
)
def test_a_model_reads_its_own_kv_and_an_activated_adapter_its_bases(family, tmp_path):
    """The model and the adapter read in the server that computed the KV, after a flush of its
    device, and in another server."""
    config = shape(family, layers=4, hidden=256, heads=4, kv_heads=2)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    (model,) = write_models(tmp_path, config, ["model"])
    adapter = write_adapter(tmp_path / "adapter", model, rank=8)
    stated = adapter / "adapter_config.json"
    fields = json.loads(stated.read_text()) | {"alora_invocation_tokens": INVOCATION}
    stated.write_text(json.dumps(fields))
    address = f"tcp://127.0.0.1:{free_port()}"
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    options = WITH_LORA | {"max-loras-per-batch": 3, "lora-target-modules": modules}
    specs = [
        ServerSpec(
            model=model,
            name="one",
            options=options,
            adapters={"skill": adapter},
            droidspeak={"listen": address, "host_gb": 0.25},
        ),
        ServerSpec(
            model=model,
            name="two",
            options=options,
            adapters={"skill": adapter},
            droidspeak={"peers": [address], "host_gb": 0},
        ),
        ServerSpec(model=model, name="plain", options=CPU),
    ]
    document, question = prompt(NUM_TOKENS, seed=1), prompt(20, seed=2)
    asked = [*document, *question]
    invoked = [*document, *INVOCATION, *question]
    num_pages = NUM_TOKENS // PAGE * PAGE
    with running(*specs, folder=tmp_path / "logs", env=SLOW_DEVICE) as (one, two, plain):
        expected = Answer(plain.generate(asked, max_new_tokens=12))
        own = {"lora_path": "skill", "droidspeak": {"mode": "off"}}
        activated = answer(one, invoked, **own)
        one.flush()
        watcher = Watcher(model, [address])
        first = answer(one, asked)
        watcher.wait_for(document, model)
        watcher.close()
        for server, outcome in ((one, "own"), (two, "reused")):
            server.flush()
            again = answer(server, asked)
            assert again.provenance["outcome"] == outcome and again.provenance["exact"]
            assert again.provenance["reused_tokens"] >= num_pages
            assert again.ids == first.ids == expected.ids
            server.flush()
            skilled = answer(server, invoked, lora_path="skill")
            assert skilled.provenance["exact"] and not skilled.provenance["recomputed_layers"]
            assert skilled.provenance["reused_tokens"] == num_pages
            assert skilled.ids == activated.ids
