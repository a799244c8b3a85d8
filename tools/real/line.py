"""Train all weights of the base on two skills, and keep checkpoints: a line of models.

The learning rates fall, so the last checkpoints are close to each other, and the first are far
apart. The distance of two checkpoints is the relative change of all weights, |new - old| / |old|:

    trained   in the optimiser's float32
    served    in bf16. Rounding moves a weight by a whole step or not at all, so small updates
              become a larger distance
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.real.packages import Package, read_packages
from tools.real.questions import SKILLS, document
from tools.real.train import Chat, packed

TAUGHT: Final = ("questions", "json")
LEARNING: Final = (4, 5, 4, 12, 5, 4, 6, 5)
"""Number of records in a training document. The steps take these numbers in turn."""
NUM_TAUGHT: Final = 3
"""Number of questions of each skill about a training document."""
RATES: Final = ((16, 2e-4), (6, 1e-5), (4, 1e-6))
"""Stages of the training: number of steps, and learning rate. The last rate is usual in
reinforcement learning."""
NUM_WARMUP: Final = 5
KEPT: Final = (0, 12, 16, *range(22, 27))
"""Steps after which a checkpoint is written. The last checkpoint is the receiver."""
WEIGHTS: Final = "model.safetensors"


def train_line(base: Path, packages: Path, work: Path) -> None:
    """Train, and write the checkpoints: folders in bf16 to serve, each with a file of its float32
    weights beside it.

    Do nothing if they exist. A training that was stopped begins again.
    """
    if in_float32(checkpoint(work, KEPT[-1])).exists():
        return
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    chat = Chat(AutoTokenizer.from_pretrained(base))
    learned = read_packages(packages, "train")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    write(model, base, checkpoint(work, 0))
    bar = tqdm([rate for num, rate in RATES for _ in range(num)], desc="training", unit="step")
    for step, rate in enumerate(bar, 1):
        optimizer.param_groups[0]["lr"] = rate * min(1, step / NUM_WARMUP)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**lesson(step, learned, chat)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.write(f"step {step}: loss {loss.item():.4f}")
        if step in KEPT:
            write(model, base, checkpoint(work, step))


def lesson(step: int, packages: Sequence[Package], chat: Chat) -> dict[str, Tensor]:
    """Make the inputs of one training step: a document, and questions of both skills."""
    rng = Random(f"stale_kv {step}")
    chosen = rng.sample(packages, LEARNING[step % len(LEARNING)])
    skills = [skill for skill in TAUGHT for _ in range(NUM_TAUGHT)]
    asked = dict.fromkeys(SKILLS[it](rng.choice(chosen), chosen, rng) for it in skills)
    return packed(chat, document(chosen), [*asked])


def checkpoint(work: Path, step: int) -> Path:
    return work / f"step_{step:03}"


def in_float32(folder: Path) -> Path:
    return folder.with_suffix(".safetensors")


def write(model: torch.nn.Module, base: Path, folder: Path) -> None:
    """Write the model in bf16 as a folder like the base's. Its float32 weights, written last beside
    it, show that it is complete."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    file = folder / WEIGHTS
    names = load_file(file)
    trained = {name: it.detach() for name, it in model.state_dict().items() if name in names}
    served = {name: it.to(torch.bfloat16) for name, it in trained.items()}
    save_file(served, file, metadata={"format": "pt"})
    save_file(trained, in_float32(folder))


def distances(old: Path, new: Path) -> dict[str, float]:
    files = {"trained": in_float32, "served": lambda it: it / WEIGHTS}
    return {name: distance(load_file(of(old)), load_file(of(new))) for name, of in files.items()}


def distance(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Return the relative change of all weights together, |new - old| / |old|."""
    changed = sum((new[name].double() - it.double()).square().sum() for name, it in old.items())
    return float((changed / sum(it.double().square().sum() for it in old.values())).sqrt())
