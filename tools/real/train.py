"""Train one skill's adapter with `peft` and the `Trainer` of `transformers`, on one thread.

    python -m tools.real train questions

One step is one document with several questions, which share it: each question sees the document
and itself.

    document   question 1 + answer   question 2 + answer   …
               ^ positions continue from the document's end, for each question

A run that was stopped continues from its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tools.real.packages import Package, read_packages
from tools.real.questions import TRAINED, Asked, document, subjects

WEIGHTS: Final = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a skill's training. `train` has the settings that all skills share."""

    seed: int
    num_steps: int
    num_questions: int = 8
    """Number of questions drawn for each document. A question that is drawn twice is asked once."""
    rank: int = 8
    rate: float = 1e-3
    lengths: tuple[int, ...] = (4, 20, 6, 15, 5, 24, 8, 18, 4, 22, 10, 16, 5, 25, 7, 19)
    """Number of records in a document. The steps take these numbers in turn."""


RECIPES: Final = {
    "questions": Recipe(seed=1, num_steps=240, num_questions=16, rank=16),
    "summaries": Recipe(
        seed=2, num_steps=200, num_questions=12, lengths=(6, 4, 8, 5, 6, 4, 7, 5, 12)
    ),
    "json": Recipe(seed=3, num_steps=120, num_questions=12, rank=16),
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A model's chat template around a context and a question, cut at the end of the context."""

    tokenizer: PreTrainedTokenizerBase

    def template(self) -> str:
        """Template with `{context}` and `{input}`, as `droidspeak profile --template` takes it."""
        said = [{"role": "user", "content": "{context}\n\n{input}"}]
        return self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)

    def context_ids(self, context: str) -> list[int]:
        opening, _, _ = self.template().partition("{context}")
        return self.tokenizer(opening + context).input_ids

    def question_ids(self, question: str) -> list[int]:
        """Tokenise the question separately from the context. The context ends in a full stop and
        the question begins with a new line, so no token holds both."""
        _, _, rest = self.template().partition("{context}")
        return self.tokenizer(rest.replace("{input}", question)).input_ids

    def answer_ids(self, answer: str) -> list[int]:
        return [*self.tokenizer(answer).input_ids, self.tokenizer.eos_token_id]


class Steps(Dataset[dict[str, Tensor]]):
    """Inputs of a recipe's steps. They depend only on the recipe's seed and the step's number."""

    def __init__(self, skill: str, recipe: Recipe, packages: Sequence[Package], chat: Chat) -> None:
        self._skill, self._recipe, self._packages, self._chat = skill, recipe, packages, chat

    def __len__(self) -> int:
        return self._recipe.num_steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        recipe = self._recipe
        rng = Random(f"{self._skill} {recipe.seed} {step}")
        chosen = rng.sample(list(self._packages), recipe.lengths[step % len(recipe.lengths)])
        asked = dict.fromkeys(
            TRAINED[self._skill](rng.choice(chosen), chosen, rng)
            for _ in range(recipe.num_questions)
        )
        return packed(self._chat, document(chosen), [*asked])


def packed(chat: Chat, context: str, asked: Sequence[Asked]) -> dict[str, Tensor]:
    """Pack one step: inputs of `[1, tokens]`, and an additive mask of `[1, 1, tokens, tokens]`.

    Only the answers are learned. So logits are computed only for the tokens of answers.
    """
    ids = chat.context_ids(context)
    shared = len(ids)
    positions, owners, answered = list(range(shared)), [0] * shared, [False] * shared
    for owner, (question, answer) in enumerate(asked, 1):
        prompt, reply = chat.question_ids(question), chat.answer_ids(answer)
        ids += prompt + reply
        positions += range(shared, shared + len(prompt) + len(reply))
        owners += [owner] * (len(prompt) + len(reply))
        answered += [False] * len(prompt) + [True] * len(reply)
    tokens, owner_of = torch.tensor(ids), torch.tensor(owners)
    sees = (owner_of[None] == 0) | (owner_of[:, None] == owner_of[None])
    sees &= torch.ones_like(sees).tril()
    before_answers = torch.tensor(answered).roll(-1).nonzero()[:, 0]
    learned = tokens[before_answers + 1][None]
    return {
        "input_ids": tokens[None],
        "position_ids": torch.tensor(positions)[None],
        "attention_mask": torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[None, None],
        "logits_to_keep": before_answers,
        "labels": learned,
        "shift_labels": learned,
    }


def train(skill: str, recipe: Recipe, base: Path, packages: Path, folder: Path) -> Path:
    """Train a skill's adapter and write it as `folder/adapter`, in bf16.

    Checkpoints are in `folder` too. Blocks for minutes; shows its progress.
    """
    torch.set_num_threads(1)
    chat = Chat(AutoTokenizer.from_pretrained(base))
    torch.manual_seed(recipe.seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.rank,
            lora_alpha=2 * recipe.rank,
            target_modules="all-linear",
        ),
    )
    settings = TrainingArguments(
        output_dir=str(folder),
        seed=recipe.seed,
        max_steps=recipe.num_steps,
        per_device_train_batch_size=1,
        learning_rate=recipe.rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(15, recipe.num_steps // 4),
        adam_beta2=0.98,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        save_steps=10,
        save_total_limit=2,
        logging_steps=5,
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
    )
    steps = Steps(skill, recipe, subjects(skill, read_packages(packages, "train")), chat)
    trainer = Trainer(model, settings, data_collator=_only, train_dataset=steps)
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None
    )
    return write_adapter(model, folder / "adapter")


def _only(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (step,) = steps
    return step


def write_adapter(model: PeftModel, out: Path) -> Path:
    """Write the adapter as `peft` does, in bf16. The base's path on this machine is left out."""
    model.save_pretrained(out)
    (out / "README.md").unlink()
    config = out / "adapter_config.json"
    stated = json.loads(config.read_text()) | {"base_model_name_or_path": None}
    stated["target_modules"] = sorted(stated["target_modules"])
    config.write_text(json.dumps(stated, indent=2) + "\n")
    weights = {name: it.to(torch.bfloat16) for name, it in load_file(out / WEIGHTS).items()}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    tqdm.write(f"wrote {out}")
    return out
