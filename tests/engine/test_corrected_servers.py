"""Corrected E wherever it comes from: a disk, a codec, a cluster's storage, another adapter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_parts import (
    CPU,
    PAGE,
    SLOW_DEVICE,
    Answer,
    answer,
    eventually,
    oracle,
    profile_of,
    prompt,
    whole_pages,
)
from forked import ServerSpec
from lora_parts import BASE, NUM_LAYERS, WITH_LORA, Checkpoints

from benchmarks.oracle import Generated
from cachetree.corrections import Correction, write_corrections
from cachetree.ids import Span
from cachetree.planning.profile import BlockQuality, write_profile
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = pytest.mark.server

HIDDEN, BLOCK = 256, Span(2, 4)
TOKENS = prompt(200, seed=17)
_DRAWN = torch.Generator().manual_seed(17)
BIAS = torch.randn(HIDDEN, generator=_DRAWN) / HIDDEN**0.5
MATRIX = torch.randn(HIDDEN, HIDDEN, generator=_DRAWN) / HIDDEN**0.5


@dataclass(frozen=True)
class Pair:
    """Of two models, whose only plan corrects E."""

    models: Checkpoints
    sender: str
    receiver: str
    profile: Path

    @classmethod
    def write(cls, folder: Path, models: Checkpoints, sender: str, receiver: str) -> Pair:
        e_map = Correction(BIAS, MATRIX)
        named = e_map.named(BLOCK.start)
        block = BlockQuality(start=BLOCK.start, stop=BLOCK.stop, quality=0.9, e_map=named)
        profile = profile_of(models.identity(sender), models.identity(receiver))
        profile = msgspec.structs.replace(profile, blocks=(block,), recommended=block)
        path = folder / "pair.json"
        write_profile(profile, path)
        write_corrections(profile, {named.sha256: e_map}, path)
        return cls(models, sender, receiver, path)

    def server(self, name: str, **settings: Any) -> ServerSpec:
        droidspeak = {"profiles": [str(self.profile)], "host_gb": 0.05, **settings}
        return ServerSpec(
            model=self.models.whole[name], name=name, options=CPU, droidspeak=droidspeak
        )

    def expected(self, *, is_corrected: bool) -> Generated:
        return oracle(
            self.models.whole[self.receiver],
            self.models.whole[self.sender],
            TOKENS,
            block=BLOCK,
            num_reused=whole_pages(len(TOKENS)),
            max_new=12,
            correct=(lambda e: e + e @ MATRIX + BIAS) if is_corrected else lambda e: e,
        )

    def check(self, reply: Answer, tolerance: float = 2e-4) -> None:
        """It is the oracle's answer from corrected E, which is not the one from E as it is."""
        told = reply.provenance
        assert (told["outcome"], told["e_corrected"], told["exact"]) == ("reused", True, False)
        assert told["block"] == [BLOCK.start, BLOCK.stop]
        assert told["reused_tokens"] == whole_pages(len(TOKENS))
        first, corrected, plain = (
            it.logprobs[0]
            for it in (
                reply,
                self.expected(is_corrected=True),
                self.expected(is_corrected=False),
            )
        )
        assert first == pytest.approx(corrected, abs=tolerance)
        assert abs(corrected - plain) > 5 * tolerance


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair.write(folder, Checkpoints.write(folder, {}, "tuned"), BASE, "tuned")


def reused(server: Server) -> Answer:
    """The answer of a server once it finds all that the other one has: pages are advertised as they
    are written, and half of them are reused, too."""

    def ask() -> Answer | None:
        server.flush()
        reply = answer(server, TOKENS)
        return reply if reply.provenance["reused_tokens"] == whole_pages(len(TOKENS)) else None

    return eventually(ask)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def stored_bytes(pair: Pair) -> int:
    """KV of all layers and E of one, in float32."""
    kv_heads = 2
    return whole_pages(len(TOKENS)) * 4 * (NUM_LAYERS * 2 * kv_heads * HIDDEN // 4 + HIDDEN)


def test_from_disk(pair: Pair, tmp_path: Path) -> None:
    """The receiver starts where the sender has ended, on its files."""
    disk = {"disk_path": str(tmp_path / "disk"), "disk_gb": 0.1}
    with running(pair.server(BASE, **disk), folder=tmp_path / "a", env=SLOW_DEVICE) as (sender,):
        sender.generate(TOKENS, max_new_tokens=1)
        eventually(lambda: size_of(tmp_path / "disk") >= stored_bytes(pair))
    with running(pair.server("tuned", **disk), folder=tmp_path / "b", env=SLOW_DEVICE) as (it,):
        reply = answer(it, TOKENS)
        pair.check(reply)
        reply.assert_equals(pair.expected(is_corrected=True))


def test_over_hicache(pair: Pair, tmp_path: Path) -> None:
    store = {
        "hicache_backend": "file",
        "hicache_config": {"file_storage_path": str(tmp_path / "store")},
    }
    specs = [pair.server(it, **store) for it in (BASE, "tuned")]
    with running(*specs, folder=tmp_path / "logs", env=SLOW_DEVICE) as (sender, receiver):
        sender.generate(TOKENS, max_new_tokens=1)
        num = len(TOKENS) // PAGE * (NUM_LAYERS + 1)
        eventually(lambda: len(list((tmp_path / "store").glob("*.bin"))) >= num)
        reply = answer(receiver, TOKENS)
        assert reply.provenance["location"] == "hicache"
        pair.check(reply)
        reply.assert_equals(pair.expected(is_corrected=True))


def test_with_a_codec(pair: Pair, tmp_path: Path) -> None:
    """The map is applied to what was decoded: nearly the answer without a codec."""
    address = f"tcp://127.0.0.1:{free_port()}"
    sender = pair.server(BASE, codec="int8", listen=address)
    receiver = pair.server("tuned", codec="int8", peers=[address])
    with running(sender, receiver, folder=tmp_path, env=SLOW_DEVICE) as (s, r):
        s.generate(TOKENS, max_new_tokens=1)
        pair.check(reused(r), tolerance=0.02)


def test_between_adapters_of_one_server(tmp_path: Path) -> None:
    made: dict[str, dict[str, Any]] = {"wide": {"rank": 8}, "other": {"rank": 8, "seed": 1}}
    pair = Pair.write(tmp_path, Checkpoints.write(tmp_path, made), "wide", "other")
    spec = ServerSpec(
        model=pair.models.whole[BASE],
        options=WITH_LORA,
        adapters=pair.models.adapters,
        droidspeak={"profiles": [str(pair.profile)], "host_gb": 0},
    )
    with running(spec, folder=tmp_path / "logs", env=SLOW_DEVICE) as (server,):
        answer(server, TOKENS, lora_path="wide", max_new_tokens=1)
        reply = answer(server, TOKENS, lora_path="other")
        assert reply.provenance["location"] == "pool"
        pair.check(reply)
        reply.assert_equals(pair.expected(is_corrected=True))
