"""What the sender reads and what the receiver is asked, as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from profiles.data import Record
from sglang_droidspeak.demo.conditions import Condition, rotated
from sglang_droidspeak.demo.documents import from_records, random_documents


def record(context: str, question: str) -> Record:
    return Record(
        input=question,
        context=context,
        answers=("x",),
        length=len(context.split()),
        dataset="d",
        language="en",
        all_classes=None,
        id=question,
    )


def by_letter(texts: Sequence[str]) -> list[list[int]]:
    """A tokenizer that joins a blank with the letter after it, as byte-pair encodings do."""
    return [[hash(piece) for piece in text.replace(" ", "\0 ").split("\0")] for text in texts]


def test_questions_on_one_context_are_one_document() -> None:
    records = [record("a b c", "q1"), record("a b c", "q2"), record("d e", "q3")]
    documents = from_records(records, "{context} {input}", by_letter)
    assert [len(document.questions) for document in documents] == [2, 1]
    assert documents[0].shared == tuple(by_letter(["a b c"])[0])


def test_a_token_that_the_question_changes_is_not_shared() -> None:
    (document,) = from_records([record("a b c", "d")], "{context}{input}", by_letter)
    assert document.shared == tuple(by_letter(["a b"])[0])


def test_the_question_is_never_part_of_what_is_shared() -> None:
    (document,) = from_records(
        [record("a b", "same"), record("a b", "same")], "{context} {input}", by_letter
    )
    assert document.shared == tuple(by_letter(["a b"])[0])


@pytest.mark.parametrize(
    ("num_tokens", "num_new", "expected"), [(33, 5, 32), (32, 1, 32), (31, 9, 16)]
)
def test_reusable_are_whole_pages(num_tokens: int, num_new: int, expected: int) -> None:
    (document,) = random_documents(1, num_tokens, num_new)
    assert len(document.questions[0].prompt) == num_tokens + num_new
    assert document.num_reusable(16) == expected


def test_random_documents_differ_from_their_first_page_on() -> None:
    documents = random_documents(5, 32, 4)
    assert len({document.shared[:16] for document in documents}) == 5


def test_no_condition_always_comes_first() -> None:
    assert {rotated(index)[0] for index in range(4)} == set(Condition)
    assert all(set(rotated(index)) == set(Condition) for index in range(4))
