"""Read AWQ, GPTQ and FP8 checkpoints as the matrices that they encode.

    awq     qweight [in, out/8], qzeros [in/group, out/8], scales [in/group, out]
            (q - z) s; a word has columns 0 2 4 6 1 3 5 7, from its lowest bits on
    gptq    qweight [in bits/32, out], qzeros [in/group, out bits/32], scales [in/group, out],
            g_idx [in], the group of each input; without it, groups have consecutive inputs
            (q - z - 1) s; without the 1 if checkpoint_format is gptq_v2
    fp8     weight [out, in], and weight_scale_inv with a scale for each tile of the matrix, or
            weight_scale with one scale or one per row
            w s

A server's kernels multiply by exactly these values. FP8 kernels also round the activations; this
module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cachetree import ConfigError

Quantization = Mapping[str, Any]
"""A checkpoint's `quantization_config`."""

_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_FP8_SCALES: Final = ("weight_scale_inv", "weight_scale", "input_scale")
_AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def check_quantization(file: Path, quantization: Quantization) -> None:
    """Raise ConfigError if this module cannot read a checkpoint with this `quantization_config`.
    The error names `file`, which is not read."""
    method = quantization.get("quant_method")
    bits = quantization.get("bits")
    is_known = {
        "awq": bits == 4 and str(quantization.get("version", "gemm")).lower() == "gemm",
        "gptq": bits in (2, 4, 8) and not quantization.get("dynamic"),
        "fp8": True,
    }
    if not is_known.get(str(method), False):
        raise ConfigError(
            f"{file} has quantization_config = {dict(quantization)}; profiles are made with "
            "unquantised weights, and with AWQ of 4 bits (gemm), GPTQ of 2, 4 or 8 bits and FP8, "
            "so give those"
        )


def matrices(
    weights: Mapping[str, Tensor], quantization: Quantization, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint that passed `check_quantization`. Quantised matrices
    become matrices in `dtype`, with the names that they have in an unquantised checkpoint."""
    if quantization["quant_method"] == "fp8":
        return _of_fp8(weights, quantization.get("weight_block_size"), dtype)
    to_matrix: Callable[..., Tensor] = _awq
    offset = 0
    if quantization["quant_method"] == "gptq":
        to_matrix = _gptq
        offset = int(quantization.get("checkpoint_format", "gptq") != "gptq_v2")
    result = dict(weights)
    for name in weights:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            parts = {it: result.pop(f"{module}.{it}", None) for it in _PARTS}
            matrix = to_matrix(**parts, bits=quantization["bits"], offset=offset)
            result[f"{module}.weight"] = matrix.T.to(dtype).contiguous()
    return result


def _awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int, **_unused: object
) -> Tensor:
    order = torch.tensor(_AWQ_COLUMNS).argsort()
    values, zeros = (
        _unpacked(it, bits).unflatten(1, (-1, len(order)))[:, :, order].flatten(1)
        for it in (qweight, qzeros)
    )
    group = torch.arange(len(values)) // (len(values) // len(scales))
    return (values - zeros[group]) * scales[group].float()


def _gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, offset: int
) -> Tensor:
    values, zeros = _unpacked(qweight.T, bits).T, _unpacked(qzeros, bits) + offset
    if g_idx is None:
        g_idx = torch.arange(len(values)) // (len(values) // len(scales))
    group = g_idx.long()
    return (values - zeros[group]) * scales[group].float()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack `[rows, words]` into `[rows, values]`. A word's first value is in its lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _of_fp8(
    weights: Mapping[str, Tensor], block: Sequence[int] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    result = {name: it for name, it in weights.items() if not name.endswith(_FP8_SCALES)}
    for name, scale in weights.items():
        module, _, part = name.rpartition(".")
        if part in _FP8_SCALES[:2]:
            weight = weights[f"{module}.weight"].float()
            if block is None:
                scale = scale.reshape(-1, 1)
            for dim, size in enumerate(block or ()):
                scale = scale.repeat_interleave(size, dim)
            rows, columns = weight.shape  # the last blocks may be smaller
            result[f"{module}.weight"] = (weight * scale.float()[:rows, :columns]).to(dtype)
    return result
