"""Small checkpoints in AWQ, GPTQ and FP8, packed as SGLang's own functions pack them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.utils import pack_cols, pack_rows

GROUP: Final = 32
BLOCK: Final = (32, 48)
BITS: Final = 4

FORMATS: Final[Mapping[str, Mapping[str, Any]]] = {
    "awq": {"bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": BITS, "group_size": GROUP, "desc_act": True, "sym": True},
    "gptq_v2": {"bits": BITS, "group_size": GROUP, "desc_act": True, "sym": False},
    "fp8": {"activation_scheme": "dynamic"},
    "fp8_of_blocks": {"activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
}
"""Fields of `quantization_config` besides the method, by the name of a format."""

Tensors = dict[str, torch.Tensor]


def write_quantised(base: Path, folder: Path, name: str) -> Path:
    """Write the unquantised checkpoint `base` in that format. Its dequantised weights go into the
    file `full_of(folder)`."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(base / "model.safetensors")
    stored, full = {}, {}
    torch.manual_seed(11)
    for key, weight in weights.items():
        if "_proj.weight" not in key:
            stored[key] = full[key] = weight
            continue
        module = key.removesuffix(".weight")
        parts, full[key] = _QUANTISE[name](weight.float())
        stored |= {f"{module}.{part}": it.contiguous() for part, it in parts.items()}
    save_file(stored, folder / "model.safetensors")
    save_file({key: it.contiguous() for key, it in full.items()}, full_of(folder))
    stated = {"quant_method": name.partition("_")[0], **FORMATS[name]}
    if name == "gptq_v2":
        stated["checkpoint_format"] = name
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return folder


def full_of(folder: Path) -> Path:
    return folder.with_suffix(".full")


Limits = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function that returns the values of the smallest and the largest integer, for groups `[groups,
values, out]`."""


def _own(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return groups.amin(1), groups.amax(1)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = 2 ** (BITS - 1)
    step = groups.abs().amax(1) / (half - 1)
    return -half * step, (half - 1) * step


def _rounded(weight: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, ...]:
    """Quantise a matrix `[out, in]`. Returns integers, zeros and scales as `[in, ...]`, and the
    matrix that they stand for."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    low, high = limits(groups)
    scales = ((high - low) / (2**BITS - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**BITS - 1).int()
    values = ((groups / scales[:, None]).round() + zeros[:, None]).clamp(0, 2**BITS - 1).int()
    full = (values - zeros[:, None]) * scales[:, None]
    return values.flatten(0, 1), zeros, scales, full.flatten(0, 1).T


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, zeros, scales, full = _rounded(weight, _own)

    def packed(values: torch.Tensor) -> torch.Tensor:
        mixed = torch.stack([values[:, column::8] for column in (0, 2, 4, 6, 1, 3, 5, 7)], 2)
        return pack_cols(mixed.flatten(1), BITS, *values.shape)

    return {"qweight": packed(values), "qzeros": packed(zeros), "scales": scales.half()}, full


def _gptq(offset: int, limits: Limits) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1]
        # Its groups are not of neighbours, but those of all matrices that multiply the same values.
        order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        values, zeros, scales, full = _rounded(weight[:, order], limits)
        place = order.argsort()
        parts = {
            "qweight": pack_rows(values[place], BITS, *values.shape),
            "qzeros": pack_cols(zeros - offset, BITS, *zeros.shape),
            "scales": scales.half(),
            "g_idx": (place // GROUP).int(),
        }
        return parts, full[:, place]

    return quantise


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _fp8_of_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values = weight.to(torch.float8_e4m3fn)
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scales = torch.rand(rows, columns) + 0.5
    of_each = torch.kron(scales, torch.ones(BLOCK))[: weight.shape[0], : weight.shape[1]]
    return {"weight": values, "weight_scale_inv": scales}, values.float() * of_each


_QUANTISE: Final[Mapping[str, Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "awq": _awq,
    "gptq": _gptq(1, _symmetric),
    "gptq_v2": _gptq(0, _own),
    "fp8": _fp8,
    "fp8_of_blocks": _fp8_of_blocks,
}
