"""The arithmetic of the table of stale KV, on two tiny models and plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.stale_kv import Reader, rows
from profiles.compute.examination import Answerer
from profiles.compute.layered import LayeredModel
from profiles.compute.room import Room
from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from tools.real.line import WEIGHTS, distance, distances, in_float32, write

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)
PREFIX, SUFFIX = tuple(range(3, 35)), (40, 41, 42)
TASK = Task(name="questions", template="{context} {input}", metric=Metric.F1, max_new=5)


class Numbers:
    """A tokenizer that writes tokens as their numbers."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def tiny(moved: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights += moved * torch.randn_like(weights)
    return model


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, reads: LlamaForCausalLM) -> tuple[list[int], Tensor]:
    """Return an answer of `model` over the KV of `reads`, and its first log-probabilities."""
    cache, unread, answer = DynamicCache(), [*SUFFIX], list[int]()
    reads(input_ids=torch.tensor([PREFIX]), past_key_values=cache)
    firsts = []
    for _ in range(TASK.max_new):
        logits = model(input_ids=torch.tensor([unread]), past_key_values=cache).logits[0, -1]
        firsts.append(logits.log_softmax(-1))
        answer.append(int(logits.argmax()))
        unread = answer[-1:]
    return answer, firsts[0]


@pytest.mark.parametrize("moved", [0.0, 1e-3, 0.3])
def test_a_comparison_is_that_of_plain_transformers(moved):
    new, old = tiny(0.0), tiny(moved)
    own, exact = greedy(new, new)
    other, stale = greedy(new, old)
    answers = (" ".join(map(str, own)),)
    question = Question(suffix=SUFFIX, draft=(), answers=answers, name="one")
    asked = Document(context="", prefix=PREFIX, questions=(question,), task=TASK)
    answerer = Answerer(
        model=LayeredModel(new),
        tokenizer=Numbers(),
        ends=frozenset(),
        room=Room(rows=2, positions=64),
    )
    reader = Reader(answerer, LayeredModel(new), {7: LayeredModel(old)})
    (result,) = reader.compare([asked], [7])
    expected = float((exact.exp() * (exact - stale)).sum())
    assert result["first_micronats"] == pytest.approx(1e6 * expected, rel=1e-2, abs=0.5)
    assert (result["step"], result["skill"], result["full"]) == (7, "questions", 1.0)
    assert result["same"] == float(own == other)
    assert (result["stale"] == 1.0) == (sorted(own) == sorted(other))
    assert moved < 0.3 or own != other, "this pair shows what is lost"


def test_rows_weigh_contexts_equally_and_bound_the_loss_from_above():
    journal = [
        {
            "length": 350,
            "tokens": 300 + context,
            "compared": [
                {"step": step, "skill": "json", "first_micronats": context, "micronats": 2.0}
                | {"same": float(context > 0), "full": 1.0, "stale": float(context + step > 0)}
                for step in (0, 9)
            ],
        }
        for context in range(100)
    ]
    near, far = rows(journal)
    assert (near["step"], far["step"], near["contexts"]) == (9, 0, 100)
    assert near["first_micronats"][0] == pytest.approx(49.5)
    assert near["first_micronats_of_95"] == pytest.approx(94.05)
    assert far["lost"][0] == 0.01
    assert 0.01 < far["lost"][2] < far["loss_bound"]
    assert near["lost"] == [0, 0, 0] and 0 < near["loss_bound"] < far["loss_bound"]


def test_a_checkpoint_is_near_in_float32_and_further_once_it_is_rounded(tmp_path):
    base = tmp_path / "base"
    tiny(0.0).bfloat16().save_pretrained(base)
    for name, moved in (("old", 0.0), ("new", 1e-5)):
        write(tiny(moved), base, tmp_path / name)
    old, new = tmp_path / "old", tmp_path / "new"
    away = distances(old, new)
    assert 1e-5 < away["trained"] < 1e-4 < away["served"] < 1e-3
    assert in_float32(new).is_file() and (new / WEIGHTS).is_file()
    assert distance({"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([3.0, 4.5])}) == 0.1
