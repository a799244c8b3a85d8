"""The four ways in which the receiver answers the same question."""

from __future__ import annotations

from enum import Enum

from cachetree import ModelId, Span


class Condition(str, Enum):
    """Names as they stand in `demo.json`."""

    FULL_PREFILL = "full_prefill"
    """The receiver alone: the reference for quality and for time."""
    FULL_REUSE = "full_reuse"
    """Every layer from the sender, nothing recomputed."""
    BLOCK = "block"
    """The profile's recommended block recomputed, the other layers from the sender."""
    ALL_LAYERS = "all_layers"
    """Every layer recomputed: must answer as the receiver alone does."""

    @property
    def title(self) -> str:
        return self.value.replace("_", " ")

    def controls(self, sender: ModelId, block: Span) -> dict[str, str]:
        """What a request of this condition says in `custom_params["droidspeak"]`."""
        blocks = {
            Condition.FULL_REUSE: "none",
            Condition.BLOCK: f"{block.start}:{block.stop}",
            Condition.ALL_LAYERS: "all",
        }
        if self is Condition.FULL_PREFILL:
            return {"mode": "off"}
        return {"sender": sender, "block": blocks[self]}


def rotated(index: int) -> list[Condition]:
    """All conditions, beginning with another one each time, so that none always comes first."""
    order = list(Condition)
    first = index % len(order)
    return order[first:] + order[:first]
