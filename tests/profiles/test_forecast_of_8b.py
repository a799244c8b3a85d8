"""The forecast in docs/profiles.md for 8B models on a GPU, from the cost model with stated
speeds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiles.compute.layered import LayeredModel
from profiles.compute.room import GIB, Sizes, most_needed
from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.evidence import CostModel
from profiles.forecast import Forecast
from profiles.report.words import duration
from profiles.settings import Settings
from profiles.stats.choice import default_group, grid

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"
ROW = re.compile(r"\| ([\d,]+) \| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")
FLOPS, READ, COPIED, STEP_S = 400e12, 3e12, 25e9, 0.03
"""Assumed values: bf16 operations per second, bytes of weights read per second, bytes per second
from host to device, and seconds of one step in transformers."""


def shape() -> LayeredModel:
    """Return the shape of Llama 3 8B, without weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    with torch.device("meta"):
        return LayeredModel(LlamaForCausalLM(config).to(torch.bfloat16))


def costs_of(model: LayeredModel) -> CostModel:
    layer = sum(it.numel() for it in model.model.model.layers[0].parameters())
    token_s, attended_s = 2 * layer / FLOPS, 2 * 4096 / FLOPS
    weights_s = 2 * layer * 32 / READ
    return CostModel(
        layer_s=STEP_S / 32,
        layer_token_s=token_s,
        layer_token2_s=attended_s,
        kv_s=STEP_S / 64,
        kv_token_s=token_s / 20,
        suffix_s=max(STEP_S, weights_s),
        suffix_token_s=32 * token_s,
        suffix_token2_s=32 * 2 * attended_s,
        load_s=0.0,
        load_byte_s=1 / COPIED,
        kv_bytes=model.kv_bytes,
        e_bytes=model.e_bytes,
        num_layers=32,
        held_out=(),
    )


def documents(number: int, num_tokens: int) -> list[Document]:
    """Return documents with six questions of 30 tokens each, and answers of up to 64 tokens; drafts
    have 10."""
    task = Task(name="", template="{context} {input}", metric=Metric.F1, max_new=64)
    question = Question(suffix=(0,) * 30, draft=(0,) * 10, answers=("a",), name="")
    one = Document(context="", prefix=(0,) * num_tokens, questions=(question,) * 6, task=task)
    return [replace(one, context=str(it)) for it in range(number)]


def rows() -> list[str]:
    model, settings = shape(), Settings()
    forecast = Forecast(costs_of(model), model.head_layers)
    lines = []
    for num_tokens in (2_000, 8_000):
        for number in (160, 600):
            half = documents(number // 2, num_tokens)
            blocks = grid(32, default_group(32))
            times = forecast.both(half, half, blocks, settings, half[:36])
            needed_gib = most_needed(Sizes.of(model), half) / GIB
            weights_gib = 2 * sum(it.numel() * 2 for it in model.model.parameters()) / GIB
            cells = f"{num_tokens:,}", str(number), *map(duration, times)
            lines.append(f"| {' | '.join(cells)} | {weights_gib + needed_gib:.0f} GiB |")
    return lines


def test_the_page_has_the_forecast_that_the_cost_model_gives():
    assert [it.group() for it in ROW.finditer(PAGE.read_text())] == rows()
