"""The two ways a stage changes weights: all of them, or a low-rank adapter.

Both keep float32 master weights, which `update` changes in place, and expose every tensor that a
checkpoint must hold. `factor` is the schedule's share of the configured rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.pairs.model import ALL_PROJECTIONS, PROJECTIONS, Shape

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRates:
    """Rates of a full fine-tune.

    `slowed` multiplies the rate of parameters by the first prefix that fits. Slowing the
    embedding and the first layers keeps them close to the foundation's, so that the layers which
    change what the model does lie further up.
    """

    matrices: float = 0.02
    others: float = 1e-3
    weight_decay: float = 0.01
    slowed: tuple[tuple[str, float], ...] = ()

    def multiplier(self, parameter: str) -> float:
        return next((m for prefix, m in self.slowed if parameter.startswith(prefix)), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRates:
    """Rate and size of a LoRA adapter on some matrices of every layer."""

    rate: float = 4e-3
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ALL_PROJECTIONS
    """By the names of LlamaForCausalLM."""

    def touches(self, parameter: str, part: int) -> bool:
        """Whether it changes this one of the matrices that lie stacked in a parameter."""
        return PROJECTIONS[parameter.split(".")[-2]][part] in self.targets


class Adam:
    """Adam's moments of some tensors by name; there is no weight decay."""

    def __init__(self, tensors: Tensors) -> None:
        self.moments: Tensors = {}
        for name, tensor in tensors.items():
            self.moments[f"{name}.mean"] = torch.zeros_like(tensor)
            self.moments[f"{name}.square"] = torch.zeros_like(tensor)

    def update(self, name: str, tensor: Tensor, gradient: Tensor, step: int, rate: float) -> None:
        mean, square = self.moments[f"{name}.mean"], self.moments[f"{name}.square"]
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
        mean_scale, square_scale = 1 - 0.9 ** (step + 1), 1 - 0.98 ** (step + 1)
        tensor.addcdiv_(mean / mean_scale, (square / square_scale).sqrt().add_(1e-8), value=-rate)


class FullUpdate:
    """Muon on matrices, Adam on the embedding and the norms."""

    def __init__(self, masters: Tensors, shape: Shape, rates: FullRates) -> None:
        self._masters = masters
        self._shape = shape
        self._rates = rates
        matrices = {name for name in masters if _is_layer_matrix(name)}
        self._momentum = {name: torch.zeros_like(masters[name]) for name in sorted(matrices)}
        self._adam = Adam({n: tensor for n, tensor in masters.items() if n not in matrices})

    def checkpoint(self) -> Tensors:
        """Live tensors: copying into them restores a checkpoint."""
        momentum = {f"momentum.{name}": t for name, t in self._momentum.items()}
        adam = {f"adam.{name}": t for name, t in self._adam.moments.items()}
        masters = {f"master.{name}": t for name, t in self._masters.items()}
        return {**masters, **momentum, **adam}

    def update(self, gradients: Tensors, step: int, factor: float) -> None:
        for name, gradient in gradients.items():
            share = factor * self._rates.multiplier(name)
            if name in self._momentum:
                self._muon(name, gradient, self._rates.matrices * share)
            else:
                rate = self._rates.others * share
                self._adam.update(name, self._masters[name], gradient, step, rate)

    def _muon(self, name: str, gradient: Tensor, rate: float) -> None:
        momentum = self._momentum[name].mul_(0.95).add_(gradient)
        direction = gradient.add(momentum, alpha=0.95)
        sizes = self._shape.projections(name)
        parts = zip(direction.split(sizes), self._masters[name].split(sizes), strict=True)
        for part, weight in parts:
            stretch = max(1.0, part.shape[0] / part.shape[1]) ** 0.5
            weight.mul_(1 - rate * self._rates.weight_decay)
            weight.add_(_orthogonal(part), alpha=-rate * stretch)


class LoraUpdate:
    """Adam on `A` and `B` of every target; the masters are base + alpha / rank x B A."""

    def __init__(self, masters: Tensors, shape: Shape, rates: LoraRates) -> None:
        self._masters = masters
        self._base = {name: tensor.clone() for name, tensor in masters.items()}
        self._shape = shape
        self._rates = rates
        self._scale = rates.alpha / rates.rank
        self.factors: Tensors = {}
        for name, tensor in masters.items():
            if not _is_layer_matrix(name):
                continue
            for i, num_rows in enumerate(shape.projections(name)):
                if not rates.touches(name, i):
                    continue
                width = tensor.shape[1]
                self.factors[f"{name}.{i}.a"] = torch.randn(rates.rank, width) / math.sqrt(width)
                self.factors[f"{name}.{i}.b"] = torch.zeros(num_rows, rates.rank)
        self._adam = Adam(self.factors)

    def checkpoint(self) -> Tensors:
        """Live tensors: copying into them restores a checkpoint."""
        adam = {f"adam.{name}": t for name, t in self._adam.moments.items()}
        masters = {f"master.{name}": t for name, t in self._masters.items()}
        return {**masters, **adam, **{f"factor.{name}": t for name, t in self.factors.items()}}

    def update(self, gradients: Tensors, step: int, factor: float) -> None:
        rate = self._rates.rate * factor
        for name, gradient in gradients.items():
            if not _is_layer_matrix(name):
                continue
            sizes = self._shape.projections(name)
            tensors = (gradient, self._masters[name], self._base[name])
            split = (tensor.split(sizes) for tensor in tensors)
            for i, (part, weight, base) in enumerate(zip(*split, strict=True)):
                if not self._rates.touches(name, i):
                    continue
                a, b = self.factors[f"{name}.{i}.a"], self.factors[f"{name}.{i}.b"]
                gradient_a = self._scale * b.T @ part
                gradient_b = self._scale * part @ a.T
                self._adam.update(f"{name}.{i}.a", a, gradient_a, step, rate)
                self._adam.update(f"{name}.{i}.b", b, gradient_b, step, rate)
                weight.copy_(base + self._scale * b @ a)


def _is_layer_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight")


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: five Newton-Schulz steps in bf16 (Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).float()
