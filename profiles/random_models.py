"""Randomly initialised models of a chosen shape, for tests of speed and exactness, never of
quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512


def shape(architecture: str, *, layers: int, hidden: int, heads: int, kv_heads: int) -> Any:
    """Return a config of one family; `architecture` is transformers' model type: llama, qwen3, …

    If a layer has experts, there are eight, and each token takes two.
    """
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    sizes = {"moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden}
    counts = dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8)
    for name, value in (sizes | counts | {"num_experts_per_tok": 2}).items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def write_models(
    folder: Path,
    config: Any,
    names: Sequence[str],
    *,
    dtype: torch.dtype = torch.float32,
    std: float = 0.05,
    seed: int = 0,
) -> list[Path]:
    """Write one checkpoint of `config` per name, each with its own weights, and one tokenizer for
    all.

    The tokens are the words `w4` … `w511`. With the default `std`, greedy answers depend on the
    whole prompt.
    """
    paths = []
    for index, name in enumerate(names):
        torch.manual_seed(seed + index)
        config.initializer_range = std
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        path = folder / name
        model.save_pretrained(path)
        numbered_words().save_pretrained(path)
        paths.append(path)
    return paths


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """Return random token ids, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def numbered_words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w4`, `w5` …; each word is named by its token id."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(4, VOCAB_SIZE))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
