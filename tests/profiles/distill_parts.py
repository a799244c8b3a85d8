"""A small base with a byte-level tokenizer, a LoRA on it, and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from profiles.random_models import shape

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
WORDS = ("red", "sea", "cat", "oak", "tin", "fig", "owl", "bay", "jam", "elm")


def write_base(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Write a model with greedy answers that depend on the whole prompt."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = [*alphabet, "ĊĊ", "<s>", "</s>"]
    tokenizer = Tokenizer(
        models.BPE({it: i for i, it in enumerate(vocabulary)}, merges=[("Ċ", "Ċ")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
    config = shape(architecture, layers=2, hidden=64, heads=4, kv_heads=2)
    config.update({"vocab_size": len(fast), "eos_token_id": fast.eos_token_id, **changes})
    config.initializer_range = 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_teacher(base: Path, folder: Path, rank: int = 2) -> Path:
    """Write a LoRA with random factors."""
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=4 * rank,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    return folder


def record(number: int, **changes: Any) -> dict[str, Any]:
    """Return a question. Three consecutive numbers ask about the same context."""
    rng = Random(number // 3)
    context = " ".join(rng.choices(WORDS, k=12)) + "."
    asked = WORDS[number % len(WORDS)]
    return {"context": context, "input": f"And {asked}?", **changes}


def write_prompts(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(it) + "\n" for it in records))
    return file
