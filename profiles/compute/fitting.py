"""Maps from the sender's E to the receiver's, fitted by least squares on sums over tokens.

    rows x    the sender's E at a layer            weight of a row: 1 / mean(x²), so that the few
    target d  the receiver's E there minus x       tokens of huge activations do not decide alone

Sums over one part of the contexts fit, those over the others choose the penalty (ridge) and say how
much a map explains; nothing of a token is kept. Two matrices of hidden × 2 hidden float32 a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachetree.corrections import Correction
from cachetree.planning import EMap
from profiles.compute.study import DocumentPasses

PENALTIES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
"""Tried, relative to the mean variance of a column of E."""
RANKS: Final = (0, 8, 16, 64, None)
"""Of maps; 0 is a bias alone, None a whole matrix."""
AS_GOOD: Final = 0.98
"""A map that explains this share of what the best one does, with less, is taken."""
NUM_FITTED: Final = 36
"""Contexts of each task that maps are fitted on."""
TRYING: Final = 4
"""Every such context chooses the penalty and the rank."""


class Moments:
    """Sums over tokens of one layer of one pair."""

    def __init__(self, hidden: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(hidden + 1, 2 * hidden + 1, device=device)
        """Of (x, 1)ᵀ (x, 1, d)."""
        self._squares = 0.0

    def add(self, theirs: Tensor, ours: Tensor) -> None:
        """E of the same tokens, `[..., tokens, hidden]`."""
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
        """Mean square of d, with that of x being 1."""
        hidden = self._sums.shape[0] - 1
        norm = float(self._sums[:hidden, :hidden].diagonal().sum())
        return self._squares / norm

    def solve(self, penalty: float) -> Centred:
        """The whole matrix of this penalty."""
        sums = self._sums.double()
        hidden = sums.shape[0] - 1
        mean = sums[hidden] / sums[hidden, hidden]
        sums = sums[:hidden] - sums[:hidden, hidden, None] * mean
        x_x, x_d = sums[:, :hidden], sums[:, hidden + 1 :]
        ridge = penalty * x_x.diagonal().mean() * torch.eye(hidden, dtype=x_x.dtype)
        matrix = torch.linalg.solve(x_x + ridge.to(x_x.device), x_d)
        return Centred(matrix, x_x, mean[:hidden], mean[hidden + 1 :])

    def explained(self, it: Correction) -> float:
        """Share of the squared distance between the two E that the map takes away."""
        sums = self._sums.double()
        hidden = sums.shape[0] - 1
        whole = torch.zeros(hidden, hidden, dtype=sums.dtype, device=sums.device)
        for factor in it.factors[:1]:
            whole = factor.double()
        for factor in it.factors[1:]:
            whole = whole @ factor.double()
        whole = torch.cat([whole, it.bias.double()[None]])
        x_x, x_d = sums[:, : hidden + 1], sums[:, hidden + 1 :]
        gained = 2 * (whole * x_d).sum() - (whole * (x_x @ whole)).sum()
        return float(gained) / self._squares if self._squares else 0.0


@dataclass(frozen=True, slots=True)
class Centred:
    """A whole matrix, and what is needed to make others of it."""

    matrix: Tensor
    x_x: Tensor
    mean_x: Tensor
    mean_d: Tensor

    def of_rank(self, rank: int | None) -> Correction:
        """The map of this rank that is nearest to it on the tokens that it was fitted on."""
        factors: tuple[Tensor, ...] = ()
        if rank is None:
            factors = (self.matrix,)
        elif rank:
            moved = self.matrix.T @ self.x_x @ self.matrix
            basis = torch.linalg.eigh(moved).eigenvectors[:, -rank:]
            factors = (self.matrix @ basis, basis.T)
        mean = self.mean_x
        for factor in factors:
            mean = mean @ factor
        bias = self.mean_d - (mean if factors else 0)
        return Correction(bias.float(), tuple(it.float().contiguous() for it in factors))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A map, and how much it explains on contexts on which it was not fitted."""

    correction: Correction
    explained: float


def fit(first: Moments, second: Moments, ranks: Iterable[int | None] = RANKS) -> list[Fitted]:
    """A map of each rank. What the first contexts give is tried on the second ones, which choose
    the penalty by the whole matrix; the maps are then of both."""
    tried = {it: first.solve(it) for it in PENALTIES}
    best = max(tried, key=lambda it: second.explained(tried[it].of_rank(None)))
    both = (first + second).solve(best)
    return [
        Fitted(both.of_rank(it), round(second.explained(tried[best].of_rank(it)), 6))
        for it in ranks
    ]


def fit_maps(
    contexts: Iterable[DocumentPasses],
    layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[EMap, Correction]:
    """For each layer, at which both E are kept, the smallest map that is as good as the best; none
    where none explains anything, or too few contexts came. They are taken one by one."""
    parts: dict[int, tuple[Moments, Moments]] = {}
    num_contexts = 0
    for passes in contexts:
        num_contexts += 1
        for layer in layers:
            theirs, ours = passes.e_of_both(layer)
            if layer not in parts:
                parts[layer] = Moments(theirs.shape[-1], device), Moments(theirs.shape[-1], device)
            parts[layer][num_contexts % TRYING == 0].add(theirs, ours)
    found = {}
    for layer, (first, second) in parts.items() if num_contexts >= TRYING else ():
        fitted = fit(first, second)
        best = max(it.explained for it in fitted)
        if best > 0:
            it = next(it for it in fitted if it.explained >= AS_GOOD * best)
            correction = it.correction.to("cpu", dtype)
            found[correction.named(layer)] = correction
    return found
