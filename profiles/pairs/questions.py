"""Write the documents and questions of the receiver's task as LongBench-style JSONL.

    python -m profiles.pairs.questions [--out profiles/pairs/data]

Biographies of 110 to 150 tokens, three questions each. The two sets come from different seeds and
share no document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Final

from profiles.pairs.documents import write_document
from profiles.records import Record, write_records

TASK: Final = "biographies"
DOCUMENT_TOKENS: Final = range(110, 151)
NUM_DOCUMENTS: Final = 24
QUESTIONS_PER_DOCUMENT: Final = 3
SEEDS: Final = {"train": 1001, "held_out": 2002}


def make_records(name: str) -> list[Record]:
    """The set of that name; the records of one document follow each other."""
    rng = Random(SEEDS[name])
    records: list[Record] = []
    num_documents = 0
    while num_documents < NUM_DOCUMENTS:
        document = write_document(rng, TASK, rng.choice(DOCUMENT_TOKENS))
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
                dataset=TASK,
                language="en",
                all_classes=None,
                id=f"{name}-{num_documents:02}-{i}",
            )
            records.append(record)
        num_documents += 1
    return records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m profiles.pairs.questions")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("data"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name in SEEDS:
        write_records(make_records(name), folder / f"{name}.jsonl")


if __name__ == "__main__":
    main()
