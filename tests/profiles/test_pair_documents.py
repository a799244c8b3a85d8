"""The programs that write the documents of the small pairs."""

from random import Random

import pytest

from tools.pairs.documents import WRITERS, write_document
from tools.pairs.words import VOCABULARY


@pytest.mark.parametrize("task", WRITERS)
def test_answers_stand_in_the_document(task):
    for seed in range(20):
        document = write_document(Random(seed), task, 120)
        text = f" {' '.join(document.sentences)} "
        assert document.questions
        assert all(f" {question.answer} " in text for question in document.questions)
        VOCABULARY.encode(text)


def test_a_biography_never_gives_the_answer_away_by_its_relation():
    """Several people have each relation, so an answer depends on the person in the question."""
    for seed in range(20):
        document = write_document(Random(seed), "biographies", 120)
        relations = [q.text.rsplit(" ", 2)[0] for q in document.questions]
        assert all(relations.count(relation) >= 3 for relation in relations)
