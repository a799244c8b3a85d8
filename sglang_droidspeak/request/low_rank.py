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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace

from sglang_droidspeak.adapters.factors import (
    Factors,
    KVFactors,
    change,
    is_linear,
    read_factors,
)

if TYPE_CHECKING:
    from cachetree import ModelId, Span
    from cachetree.planning import Match, Plan
    from sglang_droidspeak.adapters.models import Models
    from sglang_droidspeak.engine.names import LoRAAdapter
    from sglang_droidspeak.ranks import Ranks
    from sglang_droidspeak.store.capture import Attachment


class LowRank:
    """Scheduler thread only; on CUDA all of it runs on the current stream, before the forward.

    The factors of the layers that were refreshed stay on the device as long as SGLang has the
    adapter.
    """

    def __init__(
        self, attachment: Attachment, models: Models, max_tokens: int, ranks: Ranks
    ) -> None:
        """Works on so many tokens at a time."""
        self._runner: Final = attachment.runner
        self._stack: Final = attachment.stack
        self._e_pool: Final = attachment.e_pool
        self._models: Final = models
        self._max_tokens: Final = max_tokens
        self._ranks: Final = ranks
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
    def refresh(
        self, plan: Plan, layer: int, source: torch.Tensor, slots: torch.Tensor, at: Span
    ) -> None:
        """Write the receiver's K and V of tokens, which stand there in the prompt, into `slots`;
        `source` has the sender's. All ranks do so, within `Ranks.together`."""
        models = (plan.sender, plan.receiver)
        theirs, ours = (self._factors(it, layer) for it in models)
        changes = [change(*both) for both in zip(theirs, ours, strict=True)]
        pool = self._runner.token_to_kv_pool
        positions = torch.arange(at.start, at.stop, device=slots.device)
        parts = (it.split(self._max_tokens) for it in (source, slots, positions))
        for here, there, where in zip(*parts, strict=True):
            keys, values = pool.k_buffer[layer][here], pool.v_buffer[layer][here]
            k, v = self._added(layer, here, changes)
            if k is not None:
                keys += self._stack.rotated(layer, where, k).view_as(keys)
            if v is not None:
                values += v.view_as(values)
            pool.k_buffer[layer][there], pool.v_buffer[layer][there] = keys, values

    def _added(
        self, layer: int, slots: torch.Tensor, changes: Sequence[Factors | None]
    ) -> list[torch.Tensor | None]:
        """What each change makes of the x of these slots, `[tokens, rows]`."""
        if layer in self._e_pool.reduced:
            xs = self._e_pool.shared[layer].split(self._e_pool.reduced[layer][slots])
            return [it and x @ it.b.T for it, x in zip(changes, xs, strict=True)]
        x = self._stack.normed(layer, self._ranks.whole(self._e_pool.e[layer][slots]))
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
