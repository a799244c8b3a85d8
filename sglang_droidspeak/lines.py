"""Lines of models: a model that an update makes inherits a line's plan from the models before.

A server with lines starts with a model of them. Each pair of an earlier model that is remembered
and the present one is judged by its own distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cachetree import ModelId, ModelIdentity
from cachetree.checkpoint import Weights
from cachetree.planning import LineProfile

MAX_REMEMBERED: Final = 8
"""Last models that may send to the present one. No KV of older ones is read."""


class Lines:
    """Scheduler thread only."""

    def __init__(self, profiles: Sequence[LineProfile]) -> None:
        self._profiles: Final = profiles
        self._models: Final[dict[ModelId, tuple[ModelIdentity, Weights]]] = {}
        """Models with their weights, the last served one last."""

    def follow(self, model: ModelIdentity, weights: Weights) -> list[LineProfile]:
        """Note the present model, and return its pairs: those that inherit, and those that changed
        too much. The distances take a few milliseconds for each earlier model."""
        if not self._profiles:
            return []
        self._models.pop(model.model_id, None)
        pairs = [*self._pairs(model, weights)]
        self._models[model.model_id] = model, weights
        for former in [*self._models][:-MAX_REMEMBERED]:
            del self._models[former]
        return pairs

    def _pairs(self, model: ModelIdentity, weights: Weights) -> Iterator[LineProfile]:
        """Pairs of known distance, each by the first line that proves its distance, if any does."""
        for former, theirs in self._models.values():
            if (change := weights.distances_from(theirs)) is not None:
                by_lines = [it.inherited(former, model, change) for it in self._profiles]
                yield next((it for it in by_lines if it.passed), by_lines[0])
