"""Layers refreshed in low rank: the receiver's K and V from the sender's, both on one base.

With x the normalised residual stream that entered the sender's layer, W the base's matrix, and
s B A what an adapter adds to it,

    receiver's K    sender's K + rotation of (s_r B_r A_r - s_s B_s A_s) x
    receiver's V    sender's V + (s_r B_r A_r - s_s B_s A_s) x

because the rotation is linear: W, and the bias of the base, are not read. Where K is more than a
projection and a rotation, or an adapter more than such a product, the layer is projected anew.

`profiles.low_rank` is the same mathematics over PEFT files, for measurements: neither package
imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from cachetree.ids import ModelId, Span
    from sglang_droidspeak.capture import Attachment
    from sglang_droidspeak.compat.names import LoRAAdapter
    from sglang_droidspeak.job import Job
    from sglang_droidspeak.models import Models


@dataclass(frozen=True, slots=True)
class Factors:
    """The product `b @ a` that is added to a matrix: `[rank, hidden]`, and `[rows, rank]` scaled,
    where the rows are those of this tensor-parallel rank's heads."""

    a: torch.Tensor
    b: torch.Tensor


KVFactors = tuple[Factors | None, Factors | None]
"""Of K's and of V's matrix; None where an adapter, or the base, leaves it as it is."""


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
        is_known = None not in (self._factors(sender, layer), self._factors(receiver, layer))
        return is_known and layer in self._e_pool.e

    @torch.no_grad()
    def refresh(self, job: Job, layer: int, tokens: Span) -> None:
        """Write the receiver's K and V of the job's tokens, which stand there in the prompt."""
        sender, receiver = job.plan.sender, job.plan.receiver
        theirs, ours = self._factors(sender, layer), self._factors(receiver, layer)
        k, v = (change(*both) for both in zip(theirs, ours, strict=True))
        pool = self._runner.token_to_kv_pool
        positions = torch.arange(tokens.start, tokens.stop, device=job.slots.device)
        parts = (it.split(self._max_tokens) for it in (job.pool_slots, job.slots, positions))
        for source, slots, at in zip(*parts, strict=True):
            keys, values = pool.k_buffer[layer][source], pool.v_buffer[layer][source]
            x = self._stack.normed(layer, self._e_pool.e[layer][source])
            if k is not None:
                keys += self._stack.rotated(layer, at, added(k, x)).view_as(keys)
            if v is not None:
                values += added(v, x).view_as(values)
            pool.k_buffer[layer][slots], pool.v_buffer[layer][slots] = keys, values

    def _factors(self, model: ModelId, layer: int) -> KVFactors | None:
        """None where they are not known, or are not all that makes the difference."""
        if not self._is_linear or not self._models.is_loaded(model):
            return None
        lora_id = self._models.lora_id_of(model)
        if lora_id is None:
            return None, None
        adapter = self._runner.lora_manager.loras[lora_id]
        known = self._known.setdefault(adapter, {})
        if layer not in known:
            found = read_factors(adapter, layer, self._stack.attention(layer).qkv_proj)
            like = {"device": self._runner.device, "dtype": self._runner.dtype}
            known[layer] = found and tuple(
                it and Factors(it.a.to(**like), it.b.to(**like)) for it in found
            )
        return known[layer]


def is_linear(attention: Any) -> bool:
    """Whether K is a projection and the rotation of its position, and nothing else."""
    return not hasattr(attention, "k_norm") and hasattr(attention.rotary_emb, "cos_sin_cache")


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
    return Factors(torch.cat([receiver.a, sender.a]), torch.cat([receiver.b, -sender.b], 1))


def added(it: Factors, x: torch.Tensor) -> torch.Tensor:
    """`[tokens, hidden]` -> `[tokens, rows]`."""
    return x @ it.a.T @ it.b.T
