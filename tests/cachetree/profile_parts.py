"""Invented models and profiles, for tests of code that reads them."""

from __future__ import annotations

from typing import Any

from cachetree.checkpoint.family import Family, ModelIdentity
from cachetree.planning.profile import PROFILE_VERSION, PairProfile

HALF = {"model_dtype": "float16", "kv_dtype": "float16"}
"""Types of a family in half precision."""


def identity(weights: str, num_layers: int = 10) -> ModelIdentity:
    return ModelIdentity(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=2,
        rope="{}",
        tokenizer="t",
        weights=weights,
    )


def family(**settings: Any) -> Family:
    """Family of four small layers, with pages of 16 tokens."""
    usual = {"model_dtype": "float32", "kv_dtype": "float32", "page_size": 16}
    return Family(**{**identity("r", 4).shape, **usual, **settings})


def profile_of(sender, receiver, *blocks, **others):
    """Profile that has passed, and recommends the first of the blocks."""
    fields = {
        "version": PROFILE_VERSION,
        "metric": "f1",
        "data_sha256": "0",
        "num_questions": 10,
        "sender_quality": 0.3,
        "full_prefill_quality": 1.0,
        "full_reuse_quality": 0.4,
        "tolerance": 0.05,
        "recommended": blocks[0],
        "passed": True,
        "reason": "the recommended block loses 4 %",
        **others,
    }
    return PairProfile(sender=sender, receiver=receiver, blocks=blocks, **fields)
