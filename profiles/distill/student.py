"""The trained adapter: its first weights, its state on disk, and the folder that it becomes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from cachetree import ConfigError
from profiles.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_config
from profiles.data.documents import Tokens
from profiles.distill.forward import write_tensors

if TYPE_CHECKING:
    from peft import PeftModel

_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")


def require_peft() -> None:
    for name in ("peft", "accelerate"):
        if find_spec(name) is None:
            raise ConfigError(
                f"droidspeak distill trains with {name}, which is not installed; install it: "
                "pip install '/path/to/this/checkout[train]'"
            )


def make_student(
    base: PreTrainedModel, rank: int, seed: int, teacher: Path | None = None
) -> PeftModel:
    """Make a LoRA on all linear matrices of the base's layers. Its alpha is its rank.

    The student starts as the base, or as a teacher that is a LoRA. With s = alpha / r of the
    teacher, A' = [√s A; random] and B' = [√s B, 0]. Raises ConfigError if the teacher's rank is
    above `rank`.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules="all-linear")
    student = get_peft_model(base, config)
    if teacher is not None:
        _begin_as(student, teacher, rank)
    return student


@torch.no_grad()
def _begin_as(student: PeftModel, teacher: Path, rank: int) -> None:
    stated, theirs = read_config(teacher), load_file(teacher / ADAPTER_WEIGHTS)
    if stated.r > rank:
        raise ConfigError(
            f"--rank is {rank}, and the teacher {teacher} has {stated.r}; give at least that"
        )
    scale = (stated.lora_alpha / stated.r) ** 0.5
    for name, ours in adapter_parameters(student).items():
        if (factor := theirs.get(name)) is not None:
            part = ours[: stated.r] if "lora_A" in name else ours[:, : stated.r]
            part.copy_(scale * factor)


def adapter_parameters(student: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Trained parameters by their names in the adapter's file."""
    return {
        name.replace(".default.", "."): it
        for name, it in student.named_parameters()
        if it.requires_grad
    }


@torch.no_grad()
def save_state(file: Path, step: int, student: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """Save the student, its optimizer, and the number of training steps done."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in adapter_parameters(student).items():
        tensors[name] = parameter
        tensors |= {f"{name}:{key}": optimizer.state[parameter][key] for key in _MOMENTS}
    write_tensors(tensors, file, {"step": str(step)})


@torch.no_grad()
def load_state(file: Path, student: PeftModel, optimizer: torch.optim.Optimizer) -> int:
    """Load a saved state, if the file exists. Return the number of training steps done before."""
    if not file.exists():
        return 0
    tensors = load_file(file)
    for name, parameter in adapter_parameters(student).items():
        parameter.copy_(tensors[name])
        optimizer.state[parameter] = {
            key: tensors[f"{name}:{key}"].to(parameter.device if key != "step" else "cpu")
            for key in _MOMENTS
        }
    with safe_open(file, "pt") as opened:
        return int(opened.metadata()["step"])


def export_adapter(student: PeftModel, out: Path, invocation: Tokens = ()) -> Path:
    """Write the adapter as PEFT does, in bf16, with its invocation, and without its base's path on
    this machine."""
    student.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink()
    file = out / ADAPTER_CONFIG
    stated: dict[str, Any] = json.loads(file.read_text()) | {"base_model_name_or_path": None}
    stated["target_modules"] = sorted(stated["target_modules"])
    stated["alora_invocation_tokens"] = list(invocation) or None
    file.write_text(json.dumps(stated, indent=2) + "\n")
    weights = out / ADAPTER_WEIGHTS
    tensors = {name: it.to(torch.bfloat16) for name, it in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return out
