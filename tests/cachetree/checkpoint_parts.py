"""Tiny checkpoints that tests write."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors.numpy import save_file

NUM_LAYERS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "transformers_version": "5.0",
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": some(200, 32), "model.norm.weight": some(32)}
    tensors |= {
        f"model.layers.{layer}.self_attn.{name}.weight": some(64, 128)
        for layer in range(NUM_LAYERS)
        for name in ("q_proj", "k_proj")
    }
    return tensors | {"lm_head.weight": some(200, 32)}


def write(folder, tensors=None, config=CONFIG, tokenizer=TOKENIZER):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder
