"""Layers refreshed in low rank: the receiver's K and V from the sender's, both on one base.

With x the normalised residual stream that entered the sender's layer, W the base's matrix, and
s B A what an adapter adds to it,

    receiver's K    sender's K + rotation of (s_r B_r A_r - s_s B_s A_s) x
    receiver's V    sender's V + (s_r B_r A_r - s_s B_s A_s) x

because the rotation is linear: W, and the bias of the base, are not read. Where K is more than a
projection and a rotation, or an adapter more than such a product, the layer is projected anew.

Where all adapters that a server starts with have the same A, its pool may keep A x in place of E:
the rank in numbers per token, not the hidden size. (s_r B_r - s_s B_s) of it is added then, and
who comes later with another A cannot be refreshed from it.

`profiles.low_rank` is the same mathematics over PEFT files, for measurements: neither package
imports the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

    from cachetree.ids import ModelId, Span
    from cachetree.tree.entries import Match
    from sglang_droidspeak.adapters.models import Models
    from sglang_droidspeak.compat.names import LoRAAdapter, ModelRunner
    from sglang_droidspeak.request.job import Job
    from sglang_droidspeak.start.site import Site
    from sglang_droidspeak.store.capture import Attachment


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


class LowRank:
    """Scheduler thread only; on CUDA all of it runs on the current stream, before the forward.

    The factors of the layers that were refreshed stay on the device as long as SGLang has the
    adapter.
    """

    def __init__(self, attachment: Attachment, models: Models, max_tokens: int) -> None:
        """Works on so many tokens at a time."""
        self._runner: Final = attachment.runner
        self._stack: Final = attachment.stack
        self._e_pool: Final = attachment.e_pool
        self._models: Final = models
        self._max_tokens: Final = max_tokens
        self._is_linear: Final = is_linear(attachment.stack.attention(0))
        self._known: WeakKeyDictionary[LoRAAdapter, dict[int, KVFactors | None]] = (
            WeakKeyDictionary()
        )

    def can_refresh(self, sender: ModelId, receiver: ModelId, layer: int) -> bool:
        """Whether this layer of the sender's pages in the pool can be made the receiver's so."""
        if layer not in self._e_pool.layers:
            return False
        return None not in (self._factors(sender, layer), self._factors(receiver, layer))

    def of_pool(self, match: Match, receiver: ModelId) -> Match:
        """What this server's pool notes of another model, as that receiver may use it: no block
        begins at a layer that is kept reduced, nor a refresh for a model with another A."""
        reduced = self._e_pool.reduced
        if not reduced:
            return match
        pages = match.e_pages.items()
        return replace(
            match,
            e_pages={layer: n for layer, n in pages if layer not in reduced},
            reduced_pages={
                layer: n
                for layer, n in pages
                if layer in reduced and self.can_refresh(match.model, receiver, layer)
            },
        )

    @torch.no_grad()
    def refresh(self, job: Job, layer: int, tokens: Span) -> None:
        """Write the receiver's K and V of the job's tokens, which stand there in the prompt."""
        sender, receiver = job.plan.sender, job.plan.receiver
        theirs, ours = self._factors(sender, layer), self._factors(receiver, layer)
        changes = [change(*both) for both in zip(theirs, ours, strict=True)]
        pool = self._runner.token_to_kv_pool
        positions = torch.arange(tokens.start, tokens.stop, device=job.slots.device)
        parts = (it.split(self._max_tokens) for it in (job.pool_slots, job.slots, positions))
        for source, slots, at in zip(*parts, strict=True):
            keys, values = pool.k_buffer[layer][source], pool.v_buffer[layer][source]
            k, v = self._added(layer, source, changes)
            if k is not None:
                keys += self._stack.rotated(layer, at, k).view_as(keys)
            if v is not None:
                values += v.view_as(values)
            pool.k_buffer[layer][slots], pool.v_buffer[layer][slots] = keys, values

    def _added(
        self, layer: int, slots: torch.Tensor, changes: Sequence[Factors | None]
    ) -> list[torch.Tensor | None]:
        """What each change makes of the x of these slots, `[tokens, rows]`."""
        if layer in self._e_pool.reduced:
            xs = self._e_pool.shared[layer].split(self._e_pool.reduced[layer][slots])
            return [it and x @ it.b.T for it, x in zip(changes, xs, strict=True)]
        x = self._stack.normed(layer, self._e_pool.e[layer][slots])
        return [it and x @ it.a.T @ it.b.T for it in changes]

    def _factors(self, model: ModelId, layer: int) -> KVFactors | None:
        """None where they are not known, are not all that makes the difference, or have another A
        than what the pool keeps."""
        lora_ids = self._models.lora_ids
        if not self._is_linear or model not in lora_ids:
            return None
        lora_id = lora_ids[model]
        if lora_id is None:
            return None, None
        adapter = self._runner.lora_manager.loras[lora_id]
        known = self._known.setdefault(adapter, {})
        if layer not in known:
            known[layer] = self._read(adapter, layer)
        return known[layer]

    def _read(self, adapter: LoRAAdapter, layer: int) -> KVFactors | None:
        found = read_factors(adapter, layer, self._stack.attention(layer).qkv_proj)
        if found is None:
            return None
        k, v = (it and it.on(self._runner) for it in found)
        shared = self._e_pool.shared.get(layer)
        return (k, v) if shared is None else shared.of((k, v))


def is_linear(attention: Any) -> bool:
    """Whether K is a projection and the rotation of its position, and nothing else."""
    return not hasattr(attention, "k_norm") and hasattr(attention.rotary_emb, "cos_sin_cache")


def shared_a(site: Site, model: Any) -> dict[int, SharedA]:
    """By layer at which the pool keeps A x in place of E; on the host."""
    if not site.adapters or not is_linear(model.model.layers[0].self_attn):
        return {}
    found = {}
    for layer in site.refreshed_layers:
        stored = [_stored_a(adapter, layer) for adapter in site.adapters]
        k, v = (_distinct(of_all) for of_all in zip(*stored, strict=True))
        if max(len(k), len(v)) == 1:
            none = torch.empty(0, site.identity.hidden_size)
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
