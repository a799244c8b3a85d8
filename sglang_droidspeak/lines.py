"""Lines of models: after an update of weights, the new model inherits a plan from its line.

A line is a series of models, each trained from the one before (as in reinforcement learning). Its
profile has one plan for pairs of consecutive models. The server starts with a model of the line.
After each update, it measures how far the new weights are from those of each earlier model. If the
distance is small enough, the new model may read that model's KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cachetree import ModelId, ModelIdentity
from cachetree.checkpoint import Weights
from cachetree.planning import LineProfile

MAX_REMEMBERED: Final = 8
"""Number of former models that the present model may read from. KV of older models is not read."""


class Lines:
    """The models that this server has served, and the plans that they inherit from the profiles of
    lines. Scheduler thread only."""

    def __init__(self, profiles: Sequence[LineProfile]) -> None:
        self._profiles: Final = profiles
        self._models: Final[dict[ModelId, tuple[ModelIdentity, Weights]]] = {}
        """Models served so far with their weights, the latest last."""

    def follow(self, model: ModelIdentity, weights: Weights) -> list[LineProfile]:
        """Note the model that is served now. Return a profile of its pair with each earlier model.
        A profile's `passed` is true if its pair inherits a plan, false if the weights differ too
        much.

        Takes a few milliseconds for each earlier model.
        """
        if not self._profiles:
            return []
        self._models.pop(model.model_id, None)
        pairs = [*self._pairs(model, weights)]
        self._models[model.model_id] = model, weights
        for former in [*self._models][:-MAX_REMEMBERED]:
            del self._models[former]
        return pairs

    def _pairs(self, model: ModelIdentity, weights: Weights) -> Iterator[LineProfile]:
        """Yield each earlier model's pair with `model`, if the distance of their weights is known.
        The plan is from the first line that has proven this distance, if there is one."""
        for former, theirs in self._models.values():
            if (change := weights.distances_from(theirs)) is not None:
                by_lines = [it.inherited(former, model, change) for it in self._profiles]
                yield next((it for it in by_lines if it.passed), by_lines[0])
