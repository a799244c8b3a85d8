"""Models and settings that the benchmarks' servers share.

All models have random weights and one shape: they are for times, never for quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from cachetree import Family, ModelIdentity, Span
from cachetree.checkpoint import Codec, read_model_identity
from cachetree.planning import PROFILE_VERSION, BlockQuality, PairProfile
from profiles.random_models import shape, write_models

NUM_LAYERS, HIDDEN, HEADS = 12, 768, 12
BLOCK = Span(4, 7)
"""Layers that a receiver recomputes."""
PAGE = 16
ENV = {"OMP_NUM_THREADS": "1"}
"""Environment of every server: with two threads each on two cores, servers would wait for each
other's threads."""

It = TypeVar("It")


def write_random(folder: Path, names: Sequence[str]) -> list[Path]:
    config = shape("llama", layers=NUM_LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS)
    return write_models(folder, config, names)


def options(**more: Any) -> dict[str, Any]:
    """Options of an SGLang server. In their names, `_` stands for `-`."""
    of_all = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": PAGE,
        "max_running_requests": 8,
        "chunked_prefill_size": 4096,
        "sleep_on_idle": True,
    }
    return {name.replace("_", "-"): value for name, value in (of_all | more).items()}


def family_of(model: Path, dtype: str = "float32", codec: str = "none") -> Family:
    """Family of a model with the page size of these servers."""
    return Family(
        **read_model_identity(model).shape,
        model_dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE,
        codec=Codec(codec),
        tp_size=1,
        tp_rank=0,
    )


def profile_of(
    sender: ModelIdentity, receiver: ModelIdentity, *blocks: BlockQuality, passed: bool = True
) -> PairProfile:
    """Make up a profile that recommends the last of the blocks."""
    return PairProfile(
        version=PROFILE_VERSION,
        sender=sender,
        receiver=receiver,
        metric="f1",
        data_sha256="0" * 64,
        num_questions=100,
        sender_quality=0.1,
        full_prefill_quality=0.9,
        full_reuse_quality=0.1,
        tolerance=0.05,
        blocks=blocks,
        recommended=blocks[-1],
        passed=passed,
        reason="made up",
    )


def rotated(them: Sequence[It], turn: int) -> list[It]:
    """Rotate a list by the turn, so that each item is first as often as the others."""
    first = turn % len(them)
    return [*them[first:], *them[:first]]
