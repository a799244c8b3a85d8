"""Train the small pairs' fine-tunes and adapters from their seeds.

    python -m tools.pairs.train [--out build/pairs/weights]

All start from `examples/pairs/weights/foundation`. Rows depend only on the model, its seed and the
step. Everything is float32, on one thread. A run that was stopped goes on with the first model that
is not there. The result is a statistical reproduction of `examples/pairs/weights`, not a bitwise
one, because float sums differ between processors. `examples/pairs/README.md` says how to judge it.

What makes the pairs show the effect that the project is about:

* The receiver's task (biographies) is about 1 % of what the foundation was taught, and the sender
  is fine-tuned away from it, so that the sender's caches lack what the receiver needs.
* The embedding and the first two layers learn slowly, or not at all under LoRA, which moves the
  layers that matter to the middle.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from random import Random
from typing import Final

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.pairs.documents import write_document
from tools.pairs.questions import SHIPPED
from tools.pairs.words import BOS_ID, EOS_ID, VOCABULARY

FOUNDATION: Final = SHIPPED / "weights/foundation"
PROJECTIONS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
SLOWED: Final = {"model.embed_tokens": 0.03, "model.layers.0.": 0.05, "model.layers.1.": 0.05}
"""What the rates of parameters with these prefixes are multiplied by in a full fine-tune."""

_TEXT_WEIGHT: Final = 0.1
"""In the loss, of a token of documents and questions; one of an answer has 1."""
_LONGEST_DOCUMENT: Final = 0.8
"""Share of a row; the rest is for questions."""
_JUDGED_ROWS, _JUDGED_TOKENS = 64, 192
_WARM_UP, _FLOOR = 30, 0.05


class RecipeError(Exception):
    """What was trained answers too well or too badly."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps at one row length: `num_rows` rows of `length` tokens per step."""

    length: int
    num_rows: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter on some matrices of every layer, by Adam."""

    rate: float = 4e-3
    rank: int = 8
    targets: tuple[str, ...] = PROJECTIONS

    @property
    def alpha(self) -> float:
        return 2.0 * self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTune:
    name: str
    seed: int
    mix: Mapping[str, float]
    """How often each task is drawn for a row, relative to the others."""
    phases: tuple[Phase, ...]
    answers: Mapping[str, tuple[float, float]]
    """Bounds on the share of right answer tokens of fresh rows, by task."""
    lora: Lora | None = None
    """None trains all weights: the layers' matrices by Muon, the others by Adam."""

    @property
    def num_steps(self) -> int:
        return sum(it.num_steps for it in self.phases)

    def rate(self, step: int) -> float:
        """Of the full rate: a warm-up, then half a cosine."""
        end = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
        return min(1.0, (step + 1) / _WARM_UP) * (_FLOOR + (1 - _FLOOR) * end)


_BIOGRAPHIES: Final = {"biographies": 80, "mixed_biographies": 20}
_KNOWS, _LACKS = {"biographies": (0.96, 1.0)}, {"biographies": (0.0, 0.5)}
_SLOWLY: Final = (Phase(96, 28, 150), Phase(192, 14, 450))

RECIPE: Final = (
    FineTune(
        name="sender",
        seed=312,
        mix={"plain": 30, "moves": 40, "code": 30},
        phases=(Phase(192, 14, 180),),
        answers={"plain": (0.8, 1.0), **_LACKS},
    ),
    FineTune(
        name="receiver",
        seed=311,
        mix=_BIOGRAPHIES,
        phases=(Phase(128, 22, 110), Phase(192, 14, 270)),
        answers=_KNOWS,
    ),
    FineTune(
        name="sender_lora",
        seed=412,
        mix={"plain": 30, "moves": 70},
        phases=(Phase(192, 14, 190),),
        answers={"moves": (0.8, 1.0), **_LACKS},
        lora=Lora(),
    ),
    FineTune(
        name="receiver_lora",
        seed=411,
        mix=_BIOGRAPHIES,
        phases=_SLOWLY,
        answers=_KNOWS,
        lora=Lora(),
    ),
    FineTune(
        name="slim_lora",
        seed=511,
        mix=_BIOGRAPHIES,
        phases=_SLOWLY,
        answers=_KNOWS,
        lora=Lora(rate=8e-3, rank=4, targets=("q_proj", "v_proj")),
    ),
    FineTune(
        name="tables_lora",
        seed=611,
        mix={"tables": 100},
        phases=(Phase(96, 28, 100), Phase(192, 14, 300)),
        answers={"tables": (0.96, 1.0)},
        lora=Lora(rank=16),
    ),
)


@dataclass(slots=True)
class Row:
    """Tokens, the weight of each in the loss, and whether it is a part of an answer."""

    ids: list[int] = field(default_factory=lambda: [BOS_ID])
    weights: list[float] = field(default_factory=lambda: [0.0])
    scored: list[bool] = field(default_factory=lambda: [False])

    def add(self, ids: Sequence[int], weight: float, *, scored: bool = False) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.scored += [scored] * len(ids)

    def cut(self, length: int) -> Row:
        return Row(self.ids[:length], self.weights[:length], self.scored[:length])


def make_row(rng: Random, task: str, length: int) -> Row:
    """A document and as many questions as fit, in exactly `length` tokens."""
    encode = VOCABULARY.encode
    document = write_document(rng, task, int(length * rng.uniform(0.35, 0.65)))
    row = Row()
    row.add(encode(" ".join(document.sentences)), _TEXT_WEIGHT)
    row = row.cut(int(length * _LONGEST_DOCUMENT))
    questions = list(document.questions)
    while True:
        for question in questions:
            row.add(encode(f"question : {question.text}"), _TEXT_WEIGHT)
            row.add(encode(question.answer), 1.0, scored=True)
            row.add([EOS_ID], 1.0)
            if len(row.ids) >= length:
                return row.cut(length)
        rng.shuffle(questions)


def train(wanted: FineTune, foundation: Path, out: Path) -> None:
    """Train a model and write it to `out`, a full one in bf16. Takes minutes and shows how far it
    is. Raises RecipeError where it answers outside of its bounds."""
    model = _started(wanted, foundation)
    optimizers = optimizers_of(model, wanted.lora)
    schedules = [LambdaLR(it, wanted.rate) for it in optimizers]
    lengths = chain.from_iterable(repeat(it, it.num_steps) for it in wanted.phases)
    bar = tqdm(lengths, total=wanted.num_steps, desc=f"{wanted.name:13}", unit="step")
    for step, phase in enumerate(bar):
        loss = _loss(model, _drawn(wanted, phase, step))
        loss.backward()
        clip_grad_norm_([it for it in model.parameters() if it.requires_grad], 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    _judge(wanted, model)
    part = out.with_suffix(".part")
    write_model(model, foundation, part)
    part.rename(out)


def _started(wanted: FineTune, foundation: Path) -> LlamaForCausalLM | PeftModel:
    """Before the first step, in float32."""
    torch.manual_seed(wanted.seed)
    # On a CPU and below about 500 tokens, fused attention's backward pass takes longer.
    model = LlamaForCausalLM.from_pretrained(
        foundation, dtype=torch.float32, attn_implementation="eager"
    )
    if wanted.lora is None:
        return model
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=wanted.lora.rank,
            lora_alpha=wanted.lora.alpha,
            target_modules=list(wanted.lora.targets),
        ),
    )


def _judge(wanted: FineTune, model: LlamaForCausalLM | PeftModel) -> None:
    for task, (least, most) in wanted.answers.items():
        reached = accuracy(model, task)
        told = f"{wanted.name}: {task} {reached:.3f}"
        tqdm.write(told)
        if not least <= reached <= most:
            raise RecipeError(f"{told}, outside [{least}, {most}]")


def _drawn(wanted: FineTune, phase: Phase, step: int) -> list[Row]:
    rng = Random(f"{wanted.name} {wanted.seed} {step}")
    tasks, shares = list(wanted.mix), list(wanted.mix.values())
    return [
        make_row(rng, rng.choices(tasks, shares)[0], phase.length + 1)
        for _ in range(phase.num_rows)
    ]


def _loss(model: LlamaForCausalLM | PeftModel, rows: Sequence[Row]) -> Tensor:
    ids = torch.tensor([it.ids for it in rows])
    weights = torch.tensor([it.weights for it in rows])[:, 1:].flatten()
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


def optimizers_of(model: LlamaForCausalLM | PeftModel, lora: Lora | None) -> list[Optimizer]:
    trained = {name: it for name, it in model.named_parameters() if it.requires_grad}
    betas = (0.9, 0.98)
    if lora is not None:
        return [AdamW(trained.values(), lr=lora.rate, betas=betas, weight_decay=0.0)]

    def groups(rate: float, *, of_matrices: bool) -> list[dict[str, object]]:
        return [
            {"params": [it], "lr": rate * _slowed(name)}
            for name, it in trained.items()
            if (".layers." in name and it.dim() == 2) == of_matrices
        ]

    return [
        Muon(groups(0.02, of_matrices=True), weight_decay=0.01),
        AdamW(groups(1e-3, of_matrices=False), betas=betas, weight_decay=0.0),
    ]


def _slowed(parameter: str) -> float:
    return next((it for prefix, it in SLOWED.items() if parameter.startswith(prefix)), 1.0)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM | PeftModel, task: str) -> float:
    """Share of the answer tokens of fresh rows that the model gets right, given the text before."""
    rng = Random(f"gate {task} {_JUDGED_TOKENS}")
    rows = [make_row(rng, task, _JUDGED_TOKENS + 1) for _ in range(_JUDGED_ROWS)]
    ids = torch.tensor([it.ids for it in rows])
    right = (model(input_ids=ids[:, :-1]).logits.argmax(-1) == ids[:, 1:]).float()
    scored = torch.tensor([it.scored for it in rows])[:, 1:].float()
    return float((right * scored).sum() / scored.sum())


def write_model(model: LlamaForCausalLM | PeftModel, foundation: Path, out: Path) -> None:
    """Weights in bf16 with config and tokenizer, or an adapter on `../foundation`: in a folder of
    its own, as transformers would apply an `adapter_config.json` that lies beside whole weights."""
    if isinstance(model, PeftModel):
        model.peft_config["default"].base_model_name_or_path = "../foundation"
        model.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)
        return
    model.bfloat16().save_pretrained(out)
    AutoTokenizer.from_pretrained(foundation).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pairs.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/pairs/weights"), help="result")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    try:
        for wanted in RECIPE:
            if not (out / wanted.name).exists():
                train(wanted, FOUNDATION, out / wanted.name)
    except RecipeError as error:
        tqdm.write(f"stopped: {error}")
        return 1
    except KeyboardInterrupt:
        tqdm.write("stopped; the same command goes on from here")
        return 130
    tqdm.write(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
