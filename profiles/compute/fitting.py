"""Fit maps from the sender's E to the receiver's by least squares on sums over tokens.

    rows x    the sender's E at a layer
    target d  the receiver's E at that layer, minus x
    weight    1 / mean(x²) of each row, so that a few tokens of huge activations do not decide

Sums over most contexts fit a map for each penalty (ridge). Sums over the other contexts choose the
penalty, and say how much of the distance the map removes. Memory has only these two sums per layer,
hidden × 2 hidden float32 each. A map is a matrix of full rank: on every real pair it removed more
than maps of lower rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from cachetree.corrections import Correction
from cachetree.planning import EMap
from profiles.compute.study import DocumentPasses

PENALTIES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
"""Ridge penalties to try, relative to the mean variance of a column of E."""
NUM_FITTED: Final = 36
"""Largest number of contexts of each task on which maps of E are fitted."""
TRYING: Final = 4
"""One context in each group of this many chooses a map's penalty. The others fit the map."""


class Moments:
    """Sums over tokens from which a map of E at one layer is fitted."""

    def __init__(self, hidden: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(hidden + 1, 2 * hidden + 1, device=device)
        """Sum of (x, 1)ᵀ (x, 1, d) / mean(x²) over tokens. x is one token's E of the sender, and d
        is the receiver's E of the token minus x."""
        self._squares = 0.0

    def add(self, theirs: Tensor, ours: Tensor) -> None:
        """Add tokens to the sums: both models' E of the same tokens, `[..., tokens, hidden]`."""
        x, y = (it.to(self._sums.device).float().flatten(0, -2) for it in (theirs, ours))
        weight = x.square().mean(1, keepdim=True).clamp(min=1e-12).rsqrt()
        rows = torch.cat([x * weight, weight, (y - x) * weight], 1)
        self._sums += rows[:, : x.shape[1] + 1].T @ rows
        self._squares += float(rows[:, x.shape[1] + 1 :].square().sum())

    def __add__(self, other: Moments) -> Moments:
        both = Moments(self._sums.shape[0] - 1, self._sums.device)
        both._sums, both._squares = self._sums + other._sums, self._squares + other._squares
        return both

    @property
    def distance(self) -> float:
        """Mean square of the difference between both models' E, divided by the mean square of the
        sender's E."""
        hidden = self._sums.shape[0] - 1
        norm = float(self._sums[:hidden, :hidden].diagonal().sum())
        return self._squares / norm

    def solve(self, penalty: float) -> Correction:
        """Return the map of E with the least squared error on these sums plus penalty (ridge)."""
        sums = self._sums.double()
        hidden = sums.shape[0] - 1
        mean = sums[hidden] / sums[hidden, hidden]
        sums = sums[:hidden] - sums[:hidden, hidden, None] * mean
        x_x, x_d = sums[:, :hidden], sums[:, hidden + 1 :]
        ridge = penalty * x_x.diagonal().mean() * torch.eye(hidden, dtype=x_x.dtype)
        matrix = torch.linalg.solve(x_x + ridge.to(x_x.device), x_d)
        bias = mean[hidden + 1 :] - mean[:hidden] @ matrix
        return Correction(bias.float(), matrix.float().contiguous())

    def explained(self, correction: Correction) -> float:
        """Return the share of the squared distance between both models' E that a map removes."""
        sums = self._sums.double()
        hidden = sums.shape[0] - 1
        whole = torch.cat([correction.matrix, correction.bias[None]]).double()
        x_x, x_d = sums[:, : hidden + 1], sums[:, hidden + 1 :]
        gained = 2 * (whole * x_d).sum() - (whole * (x_x @ whole)).sum()
        return float(gained) / self._squares if self._squares else 0.0


def fit(first: Moments, second: Moments) -> tuple[Correction, float]:
    """Fit a map with each penalty on `first`. Choose the penalty at which it removes most of the
    squared distance in `second`. Return a map fitted on both sums with this penalty, and the share
    of the distance in `second` that the map from `first` removed."""
    explained = {it: second.explained(first.solve(it)) for it in PENALTIES}
    best = max(PENALTIES, key=explained.__getitem__)
    return (first + second).solve(best), round(explained[best], 6)


def fit_maps(
    contexts: Iterable[DocumentPasses],
    layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[EMap, Correction]:
    """Fit a map at each layer, from E of both models. A layer has no map if the map would remove no
    distance, or if there are fewer than `TRYING` contexts. One context is read at a time."""
    parts: dict[int, tuple[Moments, Moments]] = {}
    num_contexts = 0
    for passes in contexts:
        num_contexts += 1
        for layer in layers:
            theirs, ours = passes.e_of_both(layer)
            if layer not in parts:
                parts[layer] = Moments(theirs.shape[-1], device), Moments(theirs.shape[-1], device)
            parts[layer][num_contexts % TRYING == 0].add(theirs, ours)
    maps = {}
    for layer, (first, second) in parts.items() if num_contexts >= TRYING else ():
        correction, explained = fit(first, second)
        if explained > 0:
            correction = correction.to("cpu", dtype)
            maps[correction.named(layer)] = correction
    return maps
