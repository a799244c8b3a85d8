"""A base, adapters on it and a full fine-tune in servers of their own read one another's KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_parts import CPU, ENV, Answer, Watcher, answer, oracle, prompt, whole_pages

from cachetree.identity import read_model_identity
from cachetree.ids import EMPTY_SPAN, ModelId, Span
from profiles.adapters import merge_folder
from profiles.oracle import Generated
from profiles.random_models import shape, write_adapter, write_models
from sglang_droidspeak.servers import Server, ServerSpec, free_port, running

pytestmark = pytest.mark.server

NUM_LAYERS = 6
ADAPTERS = {"wide": {"rank": 8}, "upper": {"rank": 4, "layers": (4, 5), "seed": 3}}


@dataclass(frozen=True)
class Fleet:
    """Servers by the model they answer as: `base`, `tuned`, and one for both adapters."""

    servers: dict[str, Server]
    ids: dict[str, ModelId]
    whole: dict[str, Path]
    """Each model as a checkpoint, for the oracle."""
    watcher: Watcher

    def ask(self, name: str, tokens: list[int], **options) -> Answer:
        lora = {"lora_path": name} if name in ADAPTERS else {}
        return answer(self.servers[name], tokens, **lora, **options)

    def send(self, name: str, tokens: list[int]) -> None:
        self.ask(name, tokens, max_new_tokens=1, droidspeak={"mode": "off"})
        self.watcher.wait_for_model(tokens, self.ids[name])

    def expected(self, name: str, sender: str, tokens: list[int], block: Span) -> Generated:
        num_reused = whole_pages(len(tokens))
        receiver, sender_path = self.whole[name], self.whole[sender]
        return oracle(receiver, sender_path, tokens, block=block, num_reused=num_reused, max_new=12)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("across")
    config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
    base, tuned = write_models(folder, config, ["base", "tuned"])
    adapters = {name: write_adapter(folder / name, base, **made) for name, made in ADAPTERS.items()}
    whole, ids = {"base": base, "tuned": tuned}, {}
    for name, adapter in adapters.items():
        whole[name] = folder / f"{name}-merged"
        merge_folder(base, adapter, whole[name])
    for name in whole:
        model = tuned if name == "tuned" else base
        ids[name] = read_model_identity(model, None, adapters.get(name)).model_id
    ports = {name: free_port() for name in ("base", "tuned", "adapted")}
    addresses = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
    specs = [
        ServerSpec(
            model=tuned if name == "tuned" else base,
            name=name,
            options=CPU
            | (
                {"lora-backend": "torch_native", "max-lora-rank": 8, "lora-target-modules": ["all"]}
                if name == "adapted"
                else {}
            ),
            adapters=adapters if name == "adapted" else {},
            droidspeak={
                "listen": addresses[name],
                "peers": [it for it in addresses.values() if it != addresses[name]],
                "capture_layers": list(range(1, NUM_LAYERS)),
                "gate": "off",
                "host_gb": 0.25,
            },
        )
        for name in ports
    ]
    with running(*specs, folder=folder / "logs", env=ENV) as (base_server, tuned_server, adapted):
        servers = {"base": base_server, "tuned": tuned_server, "wide": adapted, "upper": adapted}
        watcher = Watcher(base, list(addresses.values()))
        try:
            yield Fleet(servers, ids, whole, watcher)
        finally:
            watcher.close()


CASES = [
    ("base", "wide", Span(2, 5)),
    ("wide", "base", Span(1, 3)),
    ("tuned", "upper", Span(0, 4)),
    ("wide", "tuned", Span(3, 6)),
]


@pytest.mark.parametrize(("sender", "receiver", "block"), CASES)
def test_block_equals_the_oracle(fleet: Fleet, sender: str, receiver: str, block: Span) -> None:
    tokens = prompt(200, seed=700 + CASES.index((sender, receiver, block)))
    fleet.send(sender, tokens)
    controls = {"sender": fleet.ids[sender], "block": f"{block.start}:{block.stop}"}
    reply = fleet.ask(receiver, tokens, droidspeak=controls)
    reply.assert_equals(fleet.expected(receiver, sender, tokens, block))
    assert reply.provenance["outcome"] == "reused"
    assert reply.provenance["location"].startswith("tcp://")


def test_an_adapter_reads_its_base_elsewhere_without_a_profile(fleet: Fleet) -> None:
    tokens = prompt(200, seed=800)
    fleet.send("base", tokens)
    reply = fleet.ask("upper", tokens)
    told = reply.provenance
    assert (told["outcome"], told["exact"], told["block"]) == ("reused", True, [4, 6])
    reply.assert_equals(fleet.expected("upper", "upper", tokens, EMPTY_SPAN))
