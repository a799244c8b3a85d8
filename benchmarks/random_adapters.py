"""Write LoRA adapters with random factors, to measure speed and exactness, never quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    layers: Sequence[int] | None = None,
    std: float = 0.05,
    seed: int = 0,
) -> Path:
    """Write a LoRA adapter on `base` as PEFT would save it. Its random factors change the base's
    answers."""
    config = AutoConfig.from_pretrained(base)
    head_dim = config.head_dim
    inner, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    sizes = {
        "q_proj": (hidden, inner),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (inner, hidden),
        "gate_proj": (hidden, wide),
        "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    touched = range(config.num_hidden_layers) if layers is None else layers
    factors = {}
    for layer in touched:
        for module in modules:
            part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            columns, rows = sizes[module]
            factors[f"{name}.lora_A.weight"] = std * torch.randn(rank, columns, generator=generator)
            factors[f"{name}.lora_B.weight"] = std * torch.randn(rows, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(factors, folder / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2.0 * rank,
        "bias": "none",
        "target_modules": list(modules),
        "layers_to_transform": None if layers is None else list(layers),
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def activate(adapter: Path, invocation: Sequence[int]) -> Path:
    """Turn the adapter in this folder into an aLoRA, which acts from these tokens on."""
    file = adapter / "adapter_config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({**stated, "alora_invocation_tokens": list(invocation)}))
    return adapter
