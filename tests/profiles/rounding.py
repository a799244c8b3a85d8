"""How far apart two computations of one tensor may be that differ in nothing but their order.

Which order a sum of products is taken in is the library's choice: it differs between CPUs, numbers
of threads and shapes. Each product is rounded, and roundings add up as a random walk does.
"""

from __future__ import annotations

import math

import torch

DEVIATIONS = 5
"""Of that walk. The tiny random models of the tests were seen at 2.7, and most below 1."""


def rounding(dtype: torch.dtype, *, terms: int, steps: int = 1) -> float:
    """Relative to the largest number of the tensor.

    `terms` is the longest sum of products, `steps` is how many layers of sums follow one another.
    Sums are taken in float32, and what leaves a layer is rounded to `dtype`.
    """
    epsilon = math.sqrt(terms) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    return DEVIATIONS * math.sqrt(steps) * epsilon


def assert_differ_by_rounding(
    got: torch.Tensor, expected: torch.Tensor, *, terms: int, steps: int = 1
) -> None:
    allowed = rounding(expected.dtype, terms=terms, steps=steps) * expected.abs().max()
    torch.testing.assert_close(got, expected, rtol=0, atol=float(allowed))
