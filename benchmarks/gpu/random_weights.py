"""Checkpoints of big random models that take almost no disk space, and a plugin that loads them.

The file of weights has a seed in place of each tensor's values. Holes in the file (it is sparse)
fill up the tensor's size. The plugin, in SGLang, makes each tensor from its seed, on the device.
Models may have equal first layers. Reuse between them is then exact.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from cachetree.checkpoint import user_cache
from cachetree.checkpoint.digests import kept
from cachetree.checkpoint.safetensors_files import layer_of, read_tensors
from profiles.random_models import numbered_words

STD: Final = 0.02
_SEED_BYTES: Final = 4
_FILE: Final = "model.safetensors"
_TARGET: Final = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def write_seeded(folder: Path, config: Any, names: Sequence[str], num_shared: int) -> list[Path]:
    """Write a checkpoint for each name, with seeds in place of bfloat16 weights. Return the
    folders. All models have equal weights below layer `num_shared`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    paths = [folder / name for name in names]
    for path in paths:
        path.mkdir()
        model.config.save_pretrained(path)
        numbered_words().save_pretrained(path)
        seeds = {}
        for name in model.state_dict():
            is_shared = layer_of(name, config.num_hidden_layers) < num_shared
            seeds[name] = zlib.crc32(f"{'' if is_shared else path.name} {name}".encode())
        _write(path / _FILE, model.state_dict(), seeds)
    return paths


def _write(file: Path, tensors: Mapping[str, torch.Tensor], seeds: Mapping[str, int]) -> None:
    header, size = {}, 0
    for name, tensor in tensors.items():
        offsets = [size, size := size + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        out.truncate(8 + len(head) + size)
    with file.open("r+b") as out:
        for name, stored in read_tensors([file]).items():
            out.seek(stored.offset)
            out.write(seeds[name].to_bytes(_SEED_BYTES, "little"))
    # The hole is not hashed: the seeds say which tensors are equal.
    kept(user_cache(), "tensors", file, lambda _: {k: f"{v:064x}" for k, v in seeds.items()})


def plugin_environment(folder: Path, path: str) -> dict[str, str]:
    """Write a plugin of SGLang into the folder. Return the environment of servers that load it.
    `path` is their PYTHONPATH without the plugin."""
    about = folder / "random_weights-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: random-weights\nVersion: 0\n")
    point = f"[sglang.srt.plugins]\nrandom_weights = {__name__}:register\n"
    (about / "entry_points.txt").write_text(point)
    return {"PYTHONPATH": f"{folder}:{path}"}


def register() -> None:
    from sglang_droidspeak.engine import HookType, place_hooks

    place_hooks({_TARGET: (_random_weights, HookType.AROUND)})


def _random_weights(
    read: Any, loader: object, source: Any, **options: object
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make the weights of a checkpoint with seeds. Let SGLang read any other checkpoint."""
    path, device = Path(source.model_or_path), "cuda" if torch.cuda.is_available() else "cpu"
    is_seeded = (path / _FILE).exists()
    yield from random_weights(path, device) if is_seeded else read(loader, source, **options)


def random_weights(path: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Make each tensor of a checkpoint that `write_seeded` wrote. Weights of norms are 1."""
    file = path / _FILE
    with file.open("rb") as opened:
        for name, stored in read_tensors([file]).items():
            opened.seek(stored.offset)
            seed = int.from_bytes(opened.read(_SEED_BYTES), "little")
            generator = torch.Generator(device).manual_seed(seed)
            tensor = torch.empty(stored.shape, dtype=torch.bfloat16, device=device)
            if name.endswith("norm.weight"):
                yield name, tensor.fill_(1)
            else:
                yield name, tensor.normal_(std=STD, generator=generator)
