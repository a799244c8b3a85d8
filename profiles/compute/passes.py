"""One document's KV and E, made when first asked for. Every prefix pass is counted here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from torch import Tensor

from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute.layered import KV, LayeredModel, Prefix, PrefixKV

FILTERED: Final = 0.25
"""By how much the first filter of a blend keeps more tokens than the mean, and the last fewer."""


class DocumentPasses:
    """What sender and receiver compute for one prefix; all of it stays in host memory.

    `e_layers` are the layers at which the sender's E is kept, `own_e_layers` those at which the
    receiver's is; `corrections` are maps of E by digest.
    """

    def __init__(
        self,
        sender: LayeredModel,
        receiver: LayeredModel,
        ids: Sequence[int],
        e_layers: Collection[int],
        own_e_layers: Collection[int] = (),
        corrections: Mapping[str, Correction] = MappingProxyType({}),
    ) -> None:
        self._own_e_layers, self._corrections = own_e_layers, corrections
        self._sender, self._receiver, self._ids, self._e_layers = sender, receiver, ids, e_layers
        self._theirs: Prefix | None = None
        self._own: Prefix | None = None
        self.count = 0
        """Prefix passes made so far."""

    @property
    def theirs(self) -> tuple[KV, ...]:
        """The sender's KV."""
        return self._sent().kv

    @property
    def own(self) -> tuple[KV, ...]:
        """The receiver's KV: what a recompute of all layers from its own embeddings gives."""
        return self._received().kv

    def e_of_both(self, layer: int) -> tuple[Tensor, Tensor]:
        """The sender's and the receiver's, at a layer at which both are kept."""
        return self._sent().e[layer], self._received().e[layer]

    def new(self, layers: Span, e_map: str = "") -> PrefixKV:
        """The receiver's KV of `layers`, from the sender's E at the first, corrected by the map of
        that digest if any; None elsewhere."""
        if layers.start == 0:
            return self.own
        e = self._sent().e[layers.start]
        if e_map:
            e = self._corrections[e_map](e[0])[None]
        made = self._receiver.recompute(e, layers)
        self.count += 1
        return [made.get(layer) for layer in range(self._receiver.num_layers)]

    def blend(self, share: float) -> PrefixKV:
        """The sender's KV with tokens recomputed as CacheBlend does it, for a share of the compute
        of a prefill."""
        self.count += 1
        kept = tokens_kept(share, len(self._ids), self._receiver.num_layers)
        return self._receiver.blend(self._ids, kept, self.theirs)

    def _received(self) -> Prefix:
        if self._own is None:
            self._own = self._receiver.prefix(self._ids, self._own_e_layers)
            self.count += 1
        return self._own

    def _sent(self) -> Prefix:
        if self._theirs is None:
            self._theirs = self._sender.prefix(self._ids, self._e_layers)
            self.count += 1
        return self._theirs


def tokens_kept(share: float, num_tokens: int, num_layers: int) -> list[int]:
    """Of each layer, for a share of all layers over all tokens: all at the first, and then ever
    fewer, from a quarter more than the mean to a quarter less."""
    mean = max(0.0, share * num_layers - 1) / max(1, num_layers - 1)
    slope = min(FILTERED, (1 - mean) / mean) if mean else 0.0
    steps = [1 - 2 * i / max(1, num_layers - 2) for i in range(num_layers - 1)]
    return [num_tokens, *(round(num_tokens * mean * (1 + slope * it)) for it in steps)]
