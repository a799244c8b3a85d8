"""Documents with questions, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from profiles.data import Record, by_context
from profiles.random_models import random_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: tuple[int, ...]
    """Document and question."""
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    shared: tuple[int, ...]
    """What the sender reads: the tokens with which all prompts of this document begin."""
    questions: tuple[Question, ...]

    def num_reusable(self, page_size: int) -> int:
        """Tokens that a cache can give each question: whole pages, never a prompt's last token."""
        shortest = min(len(question.prompt) for question in self.questions)
        return min(len(self.shared), shortest - 1) // page_size * page_size


def from_records(
    records: Sequence[Record],
    template: str,
    tokenize: Callable[[Sequence[str]], Sequence[Sequence[int]]],
) -> list[Document]:
    """One document per context.

    A tokenizer may join the end of the document with the start of the question, so what they share
    is found in the tokens, not in the text.
    """
    documents = []
    for context, group in by_context(records):
        texts = [template.format(context=context, input=record.input) for record in group]
        alone, *prompts = tokenize([template.format(context=context, input=""), *texts])
        questions = tuple(
            Question(prompt=tuple(prompt), answers=record.answers)
            for prompt, record in zip(prompts, group, strict=True)
        )
        shared = common_start([alone, *prompts])
        documents.append(Document(shared=shared, questions=questions))
    return documents


def random_documents(num_documents: int, num_tokens: int, num_new_tokens: int) -> list[Document]:
    """Documents of the randomly initialised models' tokens, with one question each."""
    documents = []
    for seed in range(num_documents):
        shared = random_prompt(num_tokens, seed)
        question = random_prompt(num_new_tokens, num_documents + seed)
        prompt = Question(prompt=(*shared, *question), answers=())
        documents.append(Document(shared=tuple(shared), questions=(prompt,)))
    return documents


def common_start(sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest prefix that all have.

    >>> common_start([[1, 2, 3], [1, 2, 4, 5], [1, 2]])
    (1, 2)
    """
    columns = zip(*sequences, strict=False)
    return tuple(column[0] for column in takewhile(lambda it: len(set(it)) == 1, columns))
