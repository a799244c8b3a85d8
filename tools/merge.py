"""Merge a LoRA adapter into its base: the result is a checkpoint folder like any other.

python -m tools.merge --base DIR --adapter DIR --out DIR
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from tqdm import tqdm

from cachetree import CacheTreeError
from cachetree.checkpoint import weight_files
from profiles.adapters import read_weights, with_adapter


def merge_folder(base: Path, adapter: Path, out: Path) -> None:
    """Write a copy of the checkpoint folder `base` with the adapter merged into its weights.

    The copy has the same shards. Raises ConfigError if a folder is broken, or if the adapter has
    settings that SGLang would ignore.
    """
    files = weight_files(base)
    weights = with_adapter(read_weights(base), adapter)
    shutil.copytree(
        base, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*(it.name for it in files))
    )
    for file in files:
        tensors = {name: weights[name].contiguous() for name in load_file(file)}
        part = out / f"{file.name}.part"  # If the disk is full, no shard looks whole.
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(out / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.merge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        merge_folder(args.base, args.adapter, args.out)
    except CacheTreeError as error:
        tqdm.write(f"merge: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
