"""A small base with random adapters, and what the oracle says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_parts import CPU, oracle, whole_pages

from benchmarks.oracle import Generated
from benchmarks.random_adapters import write_adapter
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.identity import read_model_identity
from cachetree.ids import ModelId, Span
from profiles.random_models import shape, write_models
from tools.merge import merge_folder

NUM_LAYERS = 6
BASE = "base"
WITH_LORA = CPU | {
    "lora-backend": "torch_native",
    "max-loras-per-batch": 5,
    "max-lora-rank": 8,
    "lora-target-modules": ["all"],
}
"""Options of a server with adapters."""


@dataclass(frozen=True)
class Checkpoints:
    """Models by name."""

    adapters: Mapping[str, Path]
    whole: Mapping[str, Path]
    """Each as a checkpoint of its own; adapters merged into the base."""

    @classmethod
    def write(
        cls, folder: Path, adapters: Mapping[str, Mapping[str, Any]], *others: str
    ) -> Checkpoints:
        """A base, adapters as `write_adapter` makes them, and fine-tunes of other weights."""
        config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
        names = (BASE, *others)
        whole = dict(zip(names, write_models(folder, config, names), strict=True))
        base, paths = whole[BASE], {}
        for name, made in adapters.items():
            paths[name] = write_adapter(folder / name, base, **made)
            whole[name] = folder / f"{name}-merged"
            merge_folder(base, paths[name], whole[name])
        return cls(paths, whole)

    def identity(self, name: str) -> ModelIdentity:
        adapter = self.adapters.get(name)
        folder = self.whole[name if adapter is None else BASE]
        return read_model_identity(folder, None, adapter)

    def model_id(self, name: str) -> ModelId:
        return self.identity(name).model_id

    def controls(self, sender: str, block: Span) -> dict[str, str]:
        """What a request says that wants just this."""
        literal = f"{block.start}:{block.stop}" if len(block) else "none"
        return {"sender": self.model_id(sender), "block": literal}

    def expected(
        self,
        name: str,
        sender: str,
        tokens: Sequence[int],
        block: Span,
        *,
        num_reused: int | None = None,
    ) -> Generated:
        """The oracle's answer where so many tokens are the sender's; None: as many as can be."""
        return oracle(
            self.whole[name],
            self.whole[sender],
            tokens,
            block=block,
            num_reused=whole_pages(len(tokens)) if num_reused is None else num_reused,
            max_new=12,
        )
