"""Merge a LoRA adapter into its base, so that the result is a checkpoint like any other.

python -m profiles.adapters --base DIR --adapter DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_PREFIX = "base_model.model."


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """`W + scale x B A` for every matrix that the adapter names, in W's dtype.

    KeyError where the adapter names a matrix that the base lacks.
    """
    result = dict(base)
    for key, a in adapter.items():
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix(_PREFIX).replace(".lora_A.weight", ".weight")
        b = adapter[key.replace(".lora_A.", ".lora_B.")]
        weight = base[name]
        result[name] = (weight.float() + scale * b.float() @ a.float()).to(weight.dtype)
    return result


@torch.no_grad()
def merge_folder(base: Path, adapter: Path, out: Path) -> None:
    """Write a copy of the checkpoint folder `base` with the adapter merged into its weights."""
    shutil.copytree(base, out, dirs_exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = merged(
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
        config["lora_alpha"] / config["r"],
    )
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m profiles.adapters", description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    merge_folder(args.base, args.adapter, args.out)


if __name__ == "__main__":
    main()
