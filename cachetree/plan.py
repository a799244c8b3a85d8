"""What one request will do: whose cache, which pages, which layers loaded, which recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cachetree.ids import Location, ModelId, Span
from cachetree.schedule import Strategy


class Kind(str, Enum):
    """The two kinds of state kept per layer."""

    KV = "kv"
    E = "e"


@dataclass(frozen=True, slots=True)
class Step:
    """One unit of a fetch: the whole page range of one kind at one layer."""

    kind: Kind
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For one request: how the KV of `pages` comes to be.

        layers [0, block.start)           loaded      sender's KV
        layers [block.start, block.stop)  recomputed  our KV, from the sender's E at block.start
        layers [block.stop, num_layers)   loaded      sender's KV

    An empty block loads every layer. A block that starts at 0 begins with the receiver's own
    embeddings and needs no E.
    """

    sender: ModelId
    receiver: ModelId
    location: Location
    pages: Span
    block: Span
    num_layers: int
    is_lossy: bool = False
    """What is loaded was encoded: even the receiver's own KV comes back approximate."""
    strategy: Strategy = Strategy.PIPELINED
    """How loads and recompute share time; the others are there to be compared with."""

    @property
    def transition_layer(self) -> int | None:
        """The layer whose E is fetched; None where none is needed."""
        return self.block.start if len(self.block) and self.block.start > 0 else None

    @property
    def loaded_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.block)

    @property
    def is_exact(self) -> bool:
        """True where the result is the receiver's own KV: its own cache, or every layer anew."""
        is_own = self.sender == self.receiver and not self.is_lossy
        return is_own or self.block == Span(0, self.num_layers)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What to fetch, in the order of need: E first, then KV in layer order."""
        e = () if self.transition_layer is None else (Step(Kind.E, self.transition_layer),)
        is_everything = self.strategy is Strategy.EVERYTHING_FIRST
        layers = range(self.num_layers) if is_everything else self.loaded_layers
        return (*e, *(Step(Kind.KV, layer) for layer in layers))
