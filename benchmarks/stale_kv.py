"""How much may training change a model before it should no longer read its ancestor's KV?

    make real
    python -m benchmarks.stale_kv --work build/stale_kv --json benchmarks/results/stale_kv.json

All weights of the real base are trained on two skills, at falling rates. The last checkpoint
answers over each ancestor's KV of a context (all layers), and over its own KV. The distance of two
checkpoints is the relative change of all weights (`tools/real/line.py`).

KV is computed in bf16, as it is stored. Questions and answers run in float32, because rounding in
bf16 would hide a small loss. Contexts have distinct records that the training has not seen, and one
question of each skill. A run that was stopped continues after its last context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks import result
from profiles.answerers import answerer_of
from profiles.compute.examination import Answerer
from profiles.compute.layered import LayeredModel
from profiles.compute.mixtures import Asked, forced
from profiles.compute.models import ModelSource, load_model, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import Document, make_documents
from profiles.data.records import Record, write_records
from profiles.environment import ROOT
from profiles.stats.gate import interval, loss_bound
from tools.real.check import options
from tools.real.line import KEPT, TAUGHT, checkpoint, distances, train_line
from tools.real.packages import Package, read_packages
from tools.real.questions import SKILLS, document

PACKAGES: Final = ROOT / "examples/real/packages.jsonl"
READ: Final = {350: (25, 22, 16, 0), 1000: (22, 16)}
"""Training steps of the ancestors that send KV, by the approximate length of contexts in tokens."""
NUM_RECORDS: Final = {350: 4, 1000: 12}
"""Number of records in a context, by the approximate length of contexts in tokens."""
NUM_CONTEXTS: Final = 120


def contexts(length: int, work: Path, tokenizer: Any) -> list[tuple[Document, ...]]:
    """Make the contexts of a length. Each has one document per skill, all with the same prefix."""
    parts = ("held_out", "choose", "verify")
    packages = [it for part in parts for it in read_packages(PACKAGES, part)]
    num = NUM_RECORDS[length]
    chosen = [packages[it * num :][:num] for it in range(NUM_CONTEXTS)]
    by_skill = []
    for skill in TAUGHT:
        file = work / f"{skill}_{length}.jsonl"
        write_records(questions(skill, chosen), file)
        sources = load_sources([str(file)], options(skill))
        made = make_documents(sources, tokenizer, page_size=16, max_prompt_tokens=None)
        by_skill.append(made)
    return [*zip(*by_skill, strict=True)]


def questions(skill: str, chosen: Sequence[Sequence[Package]]) -> Iterator[Record]:
    for number, packages in enumerate(chosen):
        rng = Random(f"stale_kv {skill} {number}")
        asked, answer = SKILLS[skill](rng.choice(packages), packages, rng)
        text = document(packages)
        yield Record(input=asked, context=text, answers=(answer,), dataset=f"packages_{skill}")


@dataclass(frozen=True, slots=True)
class Reader:
    """The last checkpoint, and its ancestors, from which it reads KV."""

    answerer: Answerer
    own: LayeredModel
    """The last checkpoint, in the dtype in which KV is computed."""
    ancestors: Mapping[int, LayeredModel]

    def compare(self, asked: Sequence[Document], steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Compare answers over the ancestors' KV of a context with answers over the reader's."""
        model, num = self.answerer.model, 1 + len(steps)
        models = [self.own, *(self.ancestors[it] for it in steps)]
        prefix = asked[0].prefix
        sources = [[(k.float(), v.float()) for k, v in it.prefix(prefix, ()).kv] for it in models]
        mixtures = [(source,) * model.num_layers for source in range(num)]
        for context in asked:
            (question,), (answer,) = context.questions, self.answerer.answer(context, sources[0])
            tokens = (*question.suffix, *answer[:-1])
            streams = forced(model, sources, mixtures, [tokens], num)
            exact, *stale = self._predicted(streams, len(question.suffix) - 1)
            full = self.answerer.quality(context, 0, answer)
            for step, mixture, got in zip(steps, mixtures[1:], stale, strict=True):
                kl = (exact.exp() * (exact - got)).sum(-1).clamp(min=0).tolist()
                other = answer
                if got.argmax(-1).tolist() != [*answer]:
                    again = [Asked(mixture, question.suffix, answer)]
                    (other,) = self.answerer.answer_all(context, sources, again)
                quality = self.answerer.quality(context, 0, other)
                yield {
                    "step": step,
                    "skill": context.task.name,
                    "first_micronats": 1e6 * kl[0],
                    "micronats": 1e6 * fmean(kl),
                    "same": float(other == answer),
                    "full": full,
                    "stale": quality,
                }

    @torch.inference_mode()
    def _predicted(self, streams: Sequence[Tensor], first: int) -> list[Tensor]:
        """Return the next-token log-probabilities of each stream, at its tokens from `first` on."""
        return [self.answerer.model.logits(it[0, first:]).log_softmax(-1) for it in streams]


def reader_of(base: Path, work: Path, longest: Sequence[Document]) -> Reader:
    def load(step: int, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        return load_model(ModelSource(path=checkpoint(work, step)), dtype=dtype)

    answering = load(KEPT[-1], torch.float32)
    answerer = answerer_of(answering, load_tokenizer(ModelSource(path=base)), longest)
    ancestors = {step: LayeredModel(load(step)) for step in {*chain(*READ.values())}}
    return Reader(answerer, LayeredModel(load(KEPT[-1])), ancestors)


def measure(base: Path, work: Path, journal: Path, num_contexts: int) -> None:
    """Compare the contexts that the journal does not have, lengths in turns, and append to it."""
    made = {it: contexts(it, work, load_tokenizer(ModelSource(path=base))) for it in READ}
    reader = reader_of(base, work, [it for it, *_ in made[max(READ)]])
    done = {(it["length"], it["context"]) for it in read(journal)}
    wanted = [(length, number) for number in range(num_contexts) for length in READ]
    with journal.open("a") as file:
        for length, number in tqdm([it for it in wanted if it not in done], unit="context"):
            asked = made[length][number]
            line = {"length": length, "context": number, "tokens": len(asked[0].prefix)}
            compared = [*reader.compare(asked, READ[length])]
            file.write(json.dumps({**line, "compared": compared}) + "\n")
            file.flush()


def read(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(it) for it in journal.read_text().splitlines()] if journal.exists() else []


def rows(journal: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Summarise results by ancestor, length and skill. Intervals take a context as one draw."""
    groups: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for line in journal:
        for compared in line["compared"]:
            lost = compared["full"] - compared["stale"]
            key = -compared["step"], line["length"], compared["skill"]
            groups.setdefault(key, []).append({**compared, "lost": lost, "tokens": line["tokens"]})
    for (_, length, skill), group in sorted(groups.items()):
        of = {key: [[it[key]] for it in group] for key in group[0] if key not in ("step", "skill")}
        bounds = {key: interval(values) for key, values in of.items()}
        yield {
            "step": group[0]["step"],
            "length": length,
            "skill": skill,
            "contexts": len(group),
            "first_micronats_of_95": float(np.quantile(of["first_micronats"], 0.95)),
            "loss_bound": loss_bound(of["full"], of["stale"]),
            **{key: [it.mean, it.low, it.high] for key, it in bounds.items()},
        }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--base", type=Path, default=ROOT / "build/real/base")
    parser.add_argument("--work", type=Path, default=ROOT / "build/stale_kv")
    parser.add_argument("--contexts", type=int, default=NUM_CONTEXTS, help="of each length")
    args = parser.parse_args()
    torch.set_num_threads(1)
    environment = result.here()
    args.work.mkdir(parents=True, exist_ok=True)
    train_line(args.base, PACKAGES, args.work)
    journal = args.work / "journal.jsonl"
    measure(args.base, args.work, journal, args.contexts)
    away = {
        it: distances(checkpoint(args.work, it), checkpoint(args.work, KEPT[-1]))
        for it in KEPT[:-1]
    }
    joined = [{**away[it["step"]], **it} for it in rows(read(journal))]
    result.write("stale_kv", {"rows": joined}, environment, args.json)


if __name__ == "__main__":
    main()
