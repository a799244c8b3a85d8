"""One document's KV and E, made when first asked for. Every prefix pass is counted here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from cachetree import EMPTY_SPAN, Span
from profiles.compute.layered import KV, LayeredModel, Prefix, PrefixKV


class DocumentPasses:
    """What sender and receiver compute for one prefix; all of it stays in host memory.

    `e_layers` are the layers at which the sender's E is kept.
    """

    def __init__(
        self,
        sender: LayeredModel,
        receiver: LayeredModel,
        ids: Sequence[int],
        e_layers: Collection[int],
    ) -> None:
        self._sender, self._receiver, self._ids, self._e_layers = sender, receiver, ids, e_layers
        self._theirs: Prefix | None = None
        self._own: tuple[KV, ...] | None = None
        self.count = 0
        """Prefix passes made so far."""

    @property
    def theirs(self) -> tuple[KV, ...]:
        """The sender's KV."""
        return self._sent().kv

    @property
    def own(self) -> tuple[KV, ...]:
        """The receiver's KV: what a recompute of all layers from its own embeddings gives."""
        if self._own is None:
            self._own = self._receiver.prefix(self._ids, EMPTY_SPAN).kv
            self.count += 1
        return self._own

    def new(self, layers: Span) -> PrefixKV:
        """The receiver's KV of `layers`, from the sender's E at the first; None elsewhere."""
        if layers.start == 0:
            return self.own
        made = self._receiver.recompute(self._sent().e[layers.start], layers)
        self.count += 1
        return [made.get(layer) for layer in range(self._receiver.num_layers)]

    def blend(self, share: float) -> PrefixKV:
        """The sender's KV with a share of the tokens recomputed at all layers (CacheBlend).

        Chosen are the tokens whose KV differs most between the two models at the first layer where
        any does.
        """
        num_chosen = max(1, round(share * len(self._ids)))
        deviation = torch.zeros(len(self._ids))
        for ours, theirs in zip(self.own, self.theirs, strict=True):
            deviation = sum(
                (a.float() - b.float()).square().sum((0, 1, 3))
                for a, b in zip(ours, theirs, strict=True)
            )
            if bool(deviation.any()):
                break
        chosen = deviation.topk(num_chosen).indices.sort().values
        self.count += 1
        return self._receiver.blend(self._ids, chosen, self.theirs)

    def _sent(self) -> Prefix:
        if self._theirs is None:
            self._theirs = self._sender.prefix(self._ids, self._e_layers)
            self.count += 1
        return self._theirs
