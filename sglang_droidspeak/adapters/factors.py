"""What adapters add to the matrices of K and V, as factors: read, shared, and subtracted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import LoRAAdapter, ModelRunner
    from sglang_droidspeak.start.this_server import ThisServer


@dataclass(frozen=True, slots=True)
class Factors:
    """The product `b @ a` that is added to a matrix: `[rank, hidden]`, and `[rows, rank]` scaled,
    where the rows are those of this tensor-parallel rank's heads."""

    a: torch.Tensor
    b: torch.Tensor

    def on(self, runner: ModelRunner) -> Factors:
        return Factors(*(it.to(runner.device, runner.dtype) for it in (self.a, self.b)))


KVFactors = tuple[Factors | None, Factors | None]
"""Of K's and of V's matrix; None where an adapter, or the base, leaves it as it is."""


@dataclass(frozen=True, slots=True)
class SharedA:
    """A of K's matrix and of V's, `[rank, hidden]`, in all adapters that touch it at one layer;
    rank 0 where none does."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def rank(self) -> int:
        """Of both together."""
        return len(self.k) + len(self.v)

    def on(self, runner: ModelRunner) -> SharedA:
        return SharedA(*(it.to(runner.device, runner.dtype) for it in (self.k, self.v)))

    def split(self, reduced: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A x of K and of V from `[tokens, rank]`."""
        return reduced[:, : len(self.k)], reduced[:, len(self.k) :]

    def of(self, factors: KVFactors) -> KVFactors | None:
        """The same factors with these very tensors as A; None where theirs is another."""
        k, v = factors
        is_same = all(it is None or torch.equal(it.a, a) for it, a in ((k, self.k), (v, self.v)))
        return (k and Factors(self.k, k.b), v and Factors(self.v, v.b)) if is_same else None


def is_linear(attention: Any) -> bool:
    """Whether K is a projection and the rotation of its position, and nothing else."""
    return not hasattr(attention, "k_norm") and hasattr(attention.rotary_emb, "cos_sin_cache")


def shared_a(server: ThisServer, model: Any) -> dict[int, SharedA]:
    """By layer at which the pool keeps A x in place of E; on the host."""
    if not server.adapters or not is_linear(model.model.layers[0].self_attn):
        return {}
    found = {}
    for layer in server.refreshed_layers:
        stored = [_stored_a(adapter, layer) for adapter in server.adapters]
        k, v = (_distinct(of_all) for of_all in zip(*stored, strict=True))
        if max(len(k), len(v)) == 1:
            none = torch.empty(0, server.identity.hidden_size)
            found[layer] = SharedA(*(it[0] if it else none for it in (k, v)))
    return found


def _stored_a(adapter: Path, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A of K's and of V's matrix in a PEFT folder; None where it is left out."""
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        names = [it for it in sorted(file.keys()) if f".layers.{layer}.self_attn." in it]
        a = {it.split(".")[-3]: file.get_tensor(it) for it in names if it.endswith("lora_A.weight")}
    return a.get("k_proj", a.get("qkv_proj")), a.get("v_proj", a.get("qkv_proj"))


def _distinct(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for it in tensors:
        if it is not None and not any(torch.equal(it, other) for other in found):
            found.append(it)
    return found


def read_factors(adapter: LoRAAdapter, layer: int, projection: Any) -> KVFactors | None:
    """What an adapter adds to one layer's K and V on this rank, from where SGLang keeps it; None
    where that is more than factors."""
    weights = {
        name.partition("qkv_proj.")[2]: weight
        for name, weight in adapter.layers[layer].weights.items()
        if "k_proj" in name or "v_proj" in name
    }
    if not weights:
        return None, None
    if weights.keys() != {"lora_A.weight", "lora_B.weight"}:
        return None
    # As SGLang stacks them: A of q, k and v, and B of their rows.
    _, a_k, a_v = weights["lora_A.weight"].chunk(3)
    rows = projection.base_layer.kv_proj_shard_size
    b = adapter.scaling * projection.slice_lora_b_weights(weights["lora_B.weight"]).float()
    # SGLang writes zeros for a matrix that the adapter leaves out.
    k = Factors(a_k, b[-2 * rows : -rows]) if a_k.any() else None
    v = Factors(a_v, b[-rows:]) if a_v.any() else None
    return k, v


def change(sender: Factors | None, receiver: Factors | None) -> Factors | None:
    """What the receiver's matrix has more than the sender's; None where they are the same."""
    if sender is None:
        return receiver
    if receiver is None:
        return Factors(sender.a, -sender.b)
    if sender.a is receiver.a:
        return Factors(receiver.a, receiver.b - sender.b)
    return Factors(torch.cat([receiver.a, sender.a]), torch.cat([receiver.b, -sender.b], 1))
