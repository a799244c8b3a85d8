"""Write documents of a task and questions about them as LongBench-style JSONL.

    python -m tools.pairs.questions [--task biographies] [--documents 24]
        [--out examples/pairs/data]

Documents have 110 to 150 tokens and three questions each. The two sets come from different seeds
and share no document. A larger set begins with the records of a smaller one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Final

from transformers import PreTrainedTokenizerBase

from profiles.data.datasets import load_sources
from profiles.data.documents import Document, make_documents
from profiles.data.metrics import Metric
from profiles.data.records import Record, write_records
from profiles.data.tasks import TaskOptions
from tools.pairs.documents import WRITERS, write_document

TASK: Final = "biographies"
DOCUMENT_TOKENS: Final = range(110, 151)
NUM_DOCUMENTS: Final = 24
QUESTIONS_PER_DOCUMENT: Final = 3
SEEDS: Final = {"train": 1001, "held_out": 2002}

SHIPPED: Final = Path(__file__).parents[2] / "examples" / "pairs"
"""Folder of the shipped pairs: weights, documents and profiles."""
DATA: Final = SHIPPED / "data"
OPTIONS: Final = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
"""Prompt and metric of the pairs' models."""
PAGE_SIZE: Final = 16


def make_records(
    name: str, seed: int, num_wanted: int = NUM_DOCUMENTS, task: str = TASK
) -> list[Record]:
    """Make questions about this many documents. Questions about one document follow each other."""
    rng = Random(seed)
    records: list[Record] = []
    num_documents = 0
    while num_documents < num_wanted:
        document = write_document(rng, task, rng.choice(DOCUMENT_TOKENS))
        context = " ".join(document.sentences)
        num_tokens = len(context.split())
        if num_tokens + 1 not in DOCUMENT_TOKENS:
            continue
        for i, question in enumerate(document.questions[:QUESTIONS_PER_DOCUMENT]):
            record = Record(
                input=f"question : {question.text}",
                context=context,
                answers=(question.answer,),
                length=num_tokens,
                dataset=task,
                id=f"{name}-{num_documents:02}-{i}",
            )
            records.append(record)
        num_documents += 1
    return records


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Read the documents of a file of questions, as prompts for the pairs' models."""
    sources = load_sources([str(path)], OPTIONS)
    return make_documents(sources, tokenizer, page_size=PAGE_SIZE, max_prompt_tokens=None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.pairs.questions")
    parser.add_argument("--task", choices=sorted(WRITERS), default=TASK)
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, seed in SEEDS.items():
        records = make_records(name, seed, args.documents, args.task)
        write_records(records, args.out / f"{name}.jsonl")


if __name__ == "__main__":
    main()
