"""Largest difference between two computations of one tensor that differ only in their order.

The library chooses the order in which a sum of products is taken. It differs between CPUs, numbers
of threads and shapes. Each product is rounded, and the rounding errors add up as a random walk
does.
"""

from __future__ import annotations

import math

import torch

DEVIATIONS = 5
"""Standard deviations of the random walk that are allowed. The tests' models reach at most 2.7, and
mostly less than 1."""


def rounding(dtype: torch.dtype, *, terms: int, steps: int = 1) -> float:
    """Largest rounding error, relative to the largest number of the tensor.

    `terms` is the length of the longest sum of products. `steps` is the number of layers in a row.
    Sums are computed in float32, and each layer's output is rounded to `dtype`.
    """
    epsilon = math.sqrt(terms) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    return DEVIATIONS * math.sqrt(steps) * epsilon


def assert_differ_by_rounding(got, expected, *, terms, steps=1):
    allowed = rounding(expected.dtype, terms=terms, steps=steps) * expected.abs().max()
    torch.testing.assert_close(got, expected, rtol=0, atol=float(allowed))
