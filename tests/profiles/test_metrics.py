import math
from decimal import Decimal
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge import Rouge
from thefuzz import fuzz

from profiles.data.metrics import (
    Metric,
    final_number,
    normalised_tokens,
    problem_with,
    quality,
    rouge_l,
)

ROUGE = Rouge(metrics=["rouge-l"])
ROUGE_EPSILON = 1e-7
"""Tolerance of ROUGE scores: `rouge` adds 1e-8 to a denominator."""


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("red lamp", ["red lamp"], 1.0),
        ("The Red, lamp!", ["red lamp"], 1.0),
        ("lamp", ["red lamp"], 2 / 3),
        ("lamp lamp", ["lamp"], 2 / 3),
        ("blue kite", ["red lamp"], 0.0),
        ("", ["red lamp"], 0.0),
        ("the", [""], 1.0),
        ("", ["A"], 0.0),
        ("the", ["A"], 0.0),
        ("(A).", ["A"], 1.0),
        ("It is A", ["A"], 0.5),
        ("!", ["?"], 0.0),
        ("?", ["?"], 1.0),
        ("lamp", ["blue kite", "red lamp"], 2 / 3),
    ],
)
def test_token_f1(prediction, answers, expected):
    assert quality(Metric.F1, prediction, answers) == pytest.approx(expected)


def test_articles_go_but_not_inside_words():
    assert normalised_tokens("a theme, an Anthem; the end") == ["theme", "anthem", "end"]


@pytest.mark.parametrize("metric", Metric)
def test_no_accepted_answer_is_an_error(metric):
    with pytest.raises(ValueError, match=f"{metric.value} needs at least one"):
        quality(metric, "red", [])


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        (Metric.COUNT, "There are 7.", "7", 1.0),
        (Metric.COUNT, "7 of 12", "7", 0.5),
        (Metric.COUNT, "17", "7", 0.0),
        (Metric.COUNT, "seven", "7", 0.0),
        (Metric.RETRIEVAL, "Paragraph 3", "Paragraph 3", 1.0),
        (Metric.RETRIEVAL, "the 3rd, or paragraph 30", "Paragraph 3", 0.5),
        (Metric.RETRIEVAL, "Paragraph three", "Paragraph 3", 0.0),
        (Metric.CLASSIFICATION, "Type: City", "City", 1.0),
        (Metric.CLASSIFICATION, "City or Date", "City", 0.5),
        (Metric.CLASSIFICATION, "Other location", "Other location", 1.0),
        (Metric.CLASSIFICATION, "Other location", "location", 0.5),
        (Metric.CLASSIFICATION, "a town", "City", 0.0),
    ],
)
def test_longbenchs_scores_of_classes_and_numbers(metric, prediction, answer, expected):
    """The expected scores were computed by hand from LongBench's scorers."""
    classes = ["City", "Date", "location", "Other location"]
    assert quality(metric, prediction, [answer], classes) == expected
    assert quality(metric, prediction, ["Date", answer], classes) >= expected


@pytest.mark.parametrize(
    ("metric", "answer", "problem"),
    [
        (Metric.F1, "\u5317\u4eac\u662f\u9996\u90fd", "a script without spaces, in which f1"),
        (Metric.F1, "\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e", "a script without spaces"),
        (Metric.F1, "\u0e3f100", ""),
        (Metric.ROUGE_L, "\u5317\u4eac", "a script without spaces, in which rouge_l"),
        (Metric.EDIT_SIMILARITY, "\u5317\u4eac", ""),
        (Metric.EXACT_NUMBER, "many", "without a number"),
        (Metric.CLASSIFICATION, "Town", "none of its all_classes"),
        (Metric.CLASSIFICATION, "City", ""),
        (Metric.COUNT, "seven", "no number"),
        (Metric.COUNT, "7", ""),
        (Metric.RETRIEVAL, "3", 'without "Paragraph 1"'),
        (Metric.RETRIEVAL, "Paragraph 3", ""),
        (Metric.JSON_VALUES, "[1]", "no JSON object with a key"),
        (Metric.JSON_VALUES, "{}", "no JSON object with a key"),
        (Metric.JSON_VALUES, '{"size": 4}', ""),
    ],
)
def test_answers_by_which_nothing_can_be_judged_are_refused(metric, answer, problem):
    complaint = problem_with(metric, answer, ["City", "Date"])
    assert problem in complaint and bool(problem) == bool(complaint)


WORDS = st.sampled_from(["rain", "sun", "Sun", "wind,", "fog", "hail", "3", "\n", " ", "the"])


@given(st.lists(WORDS, max_size=8), st.permutations(["sun", "rain", "fog", "wind,", "hail", "ice"]))
def test_rouge_l_equals_the_package_where_no_word_of_a_sentence_of_the_answer_is_repeated(
    prediction, answer
):
    _assert_same_rouge(". ".join([" ".join(prediction), "sun rain"]), " ".join(answer[:4]) + ".")


@given(st.lists(st.permutations(["a", "b", "c", "d", "e"]).map(" ".join), min_size=1, max_size=4))
def test_rouge_l_equals_the_package_over_several_sentences(answer):
    _assert_same_rouge("c e b. x a d a. b b", ". ".join(answer))
    _assert_same_rouge("c e b. x a d a. b b. ", ".\n".join(answer) + ". ")


def _assert_same_rouge(prediction, answer):
    published = ROUGE.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    assert rouge_l(prediction, answer) == pytest.approx(published, abs=ROUGE_EPSILON)


def test_rouge_l_stays_close_to_the_package_where_words_are_repeated():
    rng = Random(7)
    differences = []
    for _ in range(200):
        # Frequencies as in a language: the r-th word has weight 1 / r.
        words = rng.choices(range(200), [1 / r for r in range(1, 201)], k=rng.randrange(20, 90))
        heard = [word for word in words if rng.random() > 0.4] + rng.choices(range(200), k=20)
        answer, prediction = (" ".join(map(str, it)) for it in (words, heard))
        published = ROUGE.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
        differences.append(abs(rouge_l(prediction, answer) - published))
    assert fmean(differences) < 0.002
    assert max(differences) < 0.05


@pytest.mark.parametrize("prediction", ["", ".", "..."])
def test_rouge_l_of_nothing_is_nothing(prediction):
    with pytest.raises(ValueError, match="at least 1"):  # which LongBench counts as 0
        ROUGE.get_scores([prediction], ["rain. sun"])
    assert rouge_l(prediction, "rain. sun") == 0.0


def test_rouge_l_of_a_sentence_that_is_too_long_for_the_package():
    sentence = " ".join(map(str, range(1200)))
    with pytest.raises(RecursionError):
        ROUGE.get_scores([sentence], [sentence])
    assert rouge_l(sentence, sentence) == 1.0


@given(st.text(), st.text())
def test_edit_similarity_equals_the_package(prediction, answer):
    expected = fuzz.ratio(prediction, answer) / 100
    assert quality(Metric.EDIT_SIMILARITY, prediction, [answer]) == expected


def test_edit_similarity_is_of_characters_and_in_whole_percent():
    assert quality(Metric.EDIT_SIMILARITY, "return x", ["return y", "pass"]) == 0.88
    assert math.isclose(quality(Metric.EDIT_SIMILARITY, "abc", ["abd", "abc"]), 1.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48 + 24 = <<48+24=72>>72\n#### 72", "72"),
        ("#### 72\n\nQuestion: 3 birds", "72"),
        ("It is 3, then 4.", "4"),
        ("She pays $1,234.50.", "1234.50"),
        ("10-4", "4"),
        ("It falls to -4 degrees", "-4"),
        ("#### -$3", "-3"),
        (".5", "0.5"),
        ("none", None),
        ("3 #### none", None),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("prediction", "expected"), [("so 72.0", 1.0), ("#### 72", 1.0), ("73", 0.0), ("", 0.0)]
)
def test_exact_number(prediction, expected):
    assert quality(Metric.EXACT_NUMBER, prediction, ["48+24\n#### 72"]) == expected
    assert quality(Metric.EXACT_NUMBER, "none", ["none"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ('{"size": 4, "name": "ed"}', 1.0),
        ('```json\n{"name": "ed",\n"size": 4}\n``` {', 1.0),
        ('{"name": "ed", "size": "4"}', 0.5),
        ('{"name": "ed"}', 0.5),
        ('{"name": "ed", "size": 4, "colour": 4, "age": 4}', 0.5),
        ('{"name": "", "size": 0}', 0.0),
        ('{"name": "ed", "size": 4', 0.0),
        ("name ed, size 4", 0.0),
        ("{" * 100_000, 0.0),
        ('{"size": ' + "[" * 100_000, 0.0),
    ],
)
def test_json_values_counts_keys_whose_value_is_right_among_all_keys(prediction, expected):
    assert quality(Metric.JSON_VALUES, prediction, ['{"name": "ed", "size": 4}']) == expected
