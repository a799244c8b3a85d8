"""Hugging Face folders that transformers and SGLang load: LlamaForCausalLM in bf16, a word-level
tokenizer, and PEFT's layout for adapters.

An adapter gets a folder of its own: with peft installed, transformers would apply an
`adapter_config.json` that lies beside whole weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from tools.pairs.model import PROJECTIONS, RMS_EPS, Shape
from tools.pairs.stages import FOUNDATION, Stage
from tools.pairs.train import Trained
from tools.pairs.updates import LoraRates, Tensors
from tools.pairs.words import BOS, BOS_ID, EOS, EOS_ID, PAD, UNK, VOCABULARY

PAD_ID: Final = 0

_MODULES: Final = {"qkv": "self_attn", "out": "self_attn", "gate_up": "mlp", "down": "mlp"}
_MATRICES: Final = {
    matrix: tuple(f"{_MODULES[matrix]}.{name}" for name in names)
    for matrix, names in PROJECTIONS.items()
}
_NORMS: Final = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def to_llama(weights: Tensors, shape: Shape) -> Tensors:
    """The weights under the names and in the pieces of LlamaForCausalLM."""
    result = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm"],
    }
    for i in range(shape.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for norm, name in _NORMS.items():
            result[f"{theirs}{name}.weight"] = weights[f"{ours}{norm}"]
        for matrix, names in _MATRICES.items():
            stacked = weights[f"{ours}{matrix}.weight"]
            parts = stacked.split(shape.projections(f"{matrix}.weight"))
            for name, part in zip(names, parts, strict=True):
                result[f"{theirs}{name}.weight"] = part
    return result


def from_llama(weights: Tensors, shape: Shape) -> Tensors:
    """The inverse of `to_llama`, in float32."""
    result = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm": weights["model.norm.weight"],
    }
    for i in range(shape.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for norm, name in _NORMS.items():
            result[f"{ours}{norm}"] = weights[f"{theirs}{name}.weight"]
        for matrix, names in _MATRICES.items():
            parts = [weights[f"{theirs}{name}.weight"] for name in names]
            result[f"{ours}{matrix}.weight"] = torch.cat(parts)
    return {name: tensor.float() for name, tensor in result.items()}


def read_model(folder: Path) -> Trained:
    """What `export_model` wrote, as a stage would have left it: rounded to bf16."""
    file = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(num_layers=config["num_hidden_layers"])
    return Trained(
        shape=shape,
        weights=from_llama(load_file(file), shape),
        factors={},
        fingerprint=hashlib.sha256(file.read_bytes()).hexdigest()[:16],
    )


def export_model(trained: Trained, folder: Path) -> None:
    """Write config, bf16 weights and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = to_llama(trained.weights, trained.shape)
    weights = {name: t.to(torch.bfloat16).contiguous() for name, t in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape = trained.shape
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    generation = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    generation.save_pretrained(folder)
    export_tokenizer(folder)


def export_tokenizer(folder: Path) -> None:
    """A tokenizer that splits at white space and adds nothing: `<bos>` is written in the text."""
    tokenizer = Tokenizer(models.WordLevel(dict(VOCABULARY.ids), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNK, pad_token=PAD
    )
    fast.save_pretrained(folder)


def export_adapter(trained: Trained, rates: LoraRates, folder: Path) -> None:
    """Write an adapter on `../foundation` in PEFT's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    factors = {}
    for i in range(trained.shape.num_layers):
        for matrix, names in _MATRICES.items():
            for part, name in enumerate(names):
                if not rates.touches(f"{matrix}.weight", part):
                    continue
                for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
                    factor = trained.factors[f"layers.{i}.{matrix}.weight.{part}.{ours}"]
                    key = f"base_model.model.model.layers.{i}.{name}.{theirs}.weight"
                    factors[key] = factor.contiguous()
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "../foundation",
        "r": rates.rank,
        "lora_alpha": rates.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(rates.targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def export_all(stages: Iterable[Stage], trained: Mapping[str, Trained], folder: Path) -> None:
    """The foundation and what was made of it: a folder for each of these stages."""
    for stage in stages:
        if FOUNDATION not in (stage.name, stage.parent):
            continue
        if isinstance(stage.rates, LoraRates):
            export_adapter(trained[stage.name], stage.rates, folder / stage.name)
        else:
            export_model(trained[stage.name], folder / stage.name)
