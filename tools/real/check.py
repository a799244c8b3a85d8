"""How well a skill is answered by greedy decoding, with its adapter and by the base alone.

python -m tools.real check questions [--set verify] [--adapter DIR]
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from profiles.data.metrics import Metric, quality
from profiles.data.records import Record, read_records
from tools.pairs.prompts import by_context
from tools.real.train import Chat

METRICS: Final[Mapping[str, Metric]] = {
    "questions": Metric.F1,
    "summaries": Metric.ROUGE_L,
    "json": Metric.F1,
}
MAX_NEW: Final[Mapping[str, int]] = {"questions": 16, "summaries": 24, "json": 56}
"""Tokens of an answer."""


@torch.no_grad()
def answers(
    model: PreTrainedModel, chat: Chat, asked: Sequence[Record], max_new: int
) -> Iterator[str]:
    """What the model writes about one context, which it reads once."""
    shared = torch.tensor([chat.context_ids(asked[0].context)])
    read = model(input_ids=shared, past_key_values=DynamicCache(), logits_to_keep=1).past_key_values
    for record in asked:
        ids = torch.cat([shared, torch.tensor([chat.question_ids(record.input)])], dim=1)
        written = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=copy.deepcopy(read),
            max_new_tokens=max_new,
            do_sample=False,
        )
        yield chat.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def check(skill: str, base: Path, adapter: Path | None, data: Path) -> float:
    """The mean quality on a set; shows what is more wrong than right."""
    chat = Chat(AutoTokenizer.from_pretrained(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.eval()
    scores: list[float] = []
    bar = tqdm(by_context(read_records(data)), desc=f"{skill}, {data.stem}", unit="document")
    for _, asked in bar:
        for record, text in zip(asked, answers(model, chat, asked, MAX_NEW[skill]), strict=True):
            scores.append(quality(METRICS[skill], text, record.answers))
            if scores[-1] < 0.5:
                bar.write(f"{record.input}\n  wrote {text!r}, right is {record.answers[0]!r}")
        bar.set_postfix(quality=f"{fmean(scores):.3f}")
    bar.write(f"{skill}: {METRICS[skill].value} {fmean(scores):.3f} on {len(scores)} questions")
    return fmean(scores)
