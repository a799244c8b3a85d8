"""Quality of an answer, 0 to 1: LongBench's definitions, and the final number for GSM8K.

    metric           computed on                             as in LongBench v1
    f1               words after SQuAD's normalisation       qa_f1_score
    rouge_l          words, by sentence                      rouge_score (the `rouge` package)
    edit_similarity  characters, in whole percent            code_sim_score, after its choice of a
                                                             line (`tasks.AnswerPart.CODE_LINE`)
    classification   the right class, if it is named         classification_score
    count            all numbers                             count_score
    retrieval        all numbers, and "Paragraph 3"          retrieval_score
    exact_number     the final number of each                not in LongBench
    json_values      the values of an object, by key         not in LongBench
    same             the whole texts, white space aside      not in LongBench; the accepted answer
                                                             is full prefill's own

Each function says where its numbers differ from LongBench's.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_UNSPACED: Final = re.compile(
    "[\u0e01-\u0e3a\u0e40-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)
"""Characters of scripts that write no spaces: Thai without its currency sign, Lao, Burmese, Khmer,
kana and Han."""
_NUMBER: Final = re.compile(r"((?<!\w)-)?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_DIGITS: Final = re.compile(r"\d+")
_PARAGRAPH: Final = re.compile(r"Paragraph (\d+)")
_ANSWER_MARK: Final = "####"


Quality = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""Quality of an answer. A file with another number is refused when it is read."""


class Metric(StrEnum):
    """Method to judge an answer. The values are in files and on command lines and never change."""

    F1 = "f1"
    ROUGE_L = "rouge_l"
    EDIT_SIMILARITY = "edit_similarity"
    EXACT_NUMBER = "exact_number"
    CLASSIFICATION = "classification"
    COUNT = "count"
    RETRIEVAL = "retrieval"
    JSON_VALUES = "json_values"
    SAME = "same"


def problem_with(metric: Metric, answer: str, classes: Sequence[str]) -> str:
    """Return the reason why an accepted answer cannot judge predictions. Empty if it can."""
    if metric is Metric.EXACT_NUMBER and final_number(answer) is None:
        return f"an answer without a number, which {metric.value} needs"
    if metric in (Metric.F1, Metric.ROUGE_L) and _UNSPACED.search(answer):
        # The whole sentence would be one word, and nearly every answer wrong.
        return (
            f"an answer in a script without spaces, in which {metric.value} finds no words; judge "
            "it by --metric edit_similarity or exact_number"
        )
    if metric is Metric.CLASSIFICATION and answer not in classes:
        return f"an answer that is none of its all_classes, which {metric.value} needs"
    if metric is Metric.COUNT and not answer.isdecimal():
        return f"an answer that is no number, which {metric.value} needs"
    if metric is Metric.RETRIEVAL and not _PARAGRAPH.search(answer):
        return f'an answer without "Paragraph 1" or another, which {metric.value} needs'
    if metric is Metric.JSON_VALUES and not _object_in(answer):
        return f"an answer that is no JSON object with a key, which {metric.value} needs"
    return ""


def quality(
    metric: Metric, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()
) -> float:
    """Return the best score of a prediction over the accepted answers. `classes` are all classes of
    the data set. Raises ValueError if no answer is accepted."""
    if not answers:
        raise ValueError(f"{metric.value} needs at least one accepted answer")
    if metric is Metric.CLASSIFICATION:
        return max(classification(prediction, answer, classes) for answer in answers)
    return max(_SCORES[metric](prediction, answer) for answer in answers)


def normalised_tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, split at white space."""
    return _ARTICLES.sub(" ", " ".join(_with_articles(text))).split()


def _with_articles(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION).split()


def f1(prediction: str, answer: str) -> float:
    """F1 of the words of both texts, in any order.

    Two texts without any word are equal here, as in SQuAD 2; LongBench counts 0. If normalising
    removes the whole answer ("A" of a multiple choice), articles count, and then punctuation.
    LongBench and SQuAD do not see such an answer.
    """
    ways = normalised_tokens, _with_articles, str.split
    words = next((it for it in ways if it(answer)), normalised_tokens)
    predicted, expected = words(prediction), words(answer)
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the union longest common subsequence over sentences, words counted once (Lin, 2004).

    The definition is the `rouge` package's. Sentences end at every full stop. Each sentence of one
    text is paired with each of the other. The words of their longest common subsequences form a
    set. Precision and recall divide its size by the numbers of different words in both texts.

    Three things differ from the package. It adds 1e-8 to a denominator. It fails at sentences of
    about a thousand words, for which LongBench counts 0. If a sentence of the answer repeats a
    word, several subsequences may be longest, and the package may choose another one.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return 0.0
    common = {
        word
        for theirs in expected
        for ours in predicted
        for word in _common_subsequence(ours, theirs)
    }
    return 2 * len(common) / (len(set().union(*predicted)) + len(set().union(*expected)))


def edit_similarity(prediction: str, answer: str) -> float:
    """Twice the length of the longest common subsequence of characters, divided by the sum of both
    lengths, rounded to whole percent.

    The value is that of `fuzz.ratio` in thefuzz. LongBench's fuzzywuzzy has the same value if
    python-Levenshtein is installed, too. Without it, fuzzywuzzy takes difflib's matching blocks,
    which are never longer.
    """
    return round(fuzz.ratio(prediction, answer)) / 100


def exact_number(prediction: str, answer: str) -> float:
    """Return 1 if both texts end in the same number, else 0."""
    number = final_number(prediction)
    return float(number is not None and number == final_number(answer))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes that the answer names) if it names the right one, else 0. A
    class that is a part of the right class's name does not count.

    LongBench's loop skips the class behind each class that it has left out.
    """
    named = [it for it in classes if it in prediction and (it == answer or it not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the text that are equal to the answer."""
    numbers = _DIGITS.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """The right answer names a paragraph by its number. The score is the share of this number among
    all numbers in the text."""
    paragraph = _PARAGRAPH.search(answer)
    return count(prediction, paragraph[1]) if paragraph else 0.0


def json_values(prediction: str, answer: str) -> float:
    """Share of keys with equal values, among all keys of the two objects.

    A right key with a wrong value scores nothing, because questions often name the keys. The first
    brace of a text begins its object; other text is ignored. A text without an object scores 0.
    """
    predicted, expected = _object_in(prediction), _object_in(answer)
    keys = predicted.keys() | expected.keys()
    right = [it for it in predicted.keys() & expected.keys() if predicted[it] == expected[it]]
    return len(right) / len(keys) if keys else 0.0


def same(prediction: str, answer: str) -> float:
    """Return 1 if two answers of one model have the same text apart from white space, else 0.

    Case, articles and punctuation count: one model has one style, and "1.5" is not "15". An answer
    that is partly the same scores 0, because a long answer may differ by one wrong number.
    """
    return float(prediction.split() == answer.split())


def final_number(text: str) -> Decimal | None:
    """Return the number after the first `####`, or else the last number. None if the text has no
    number.

    Dollar signs and the commas between thousands do not count.
    """
    solution, mark, conclusion = text.partition(_ANSWER_MARK)
    numbers = _NUMBER.findall(conclusion if mark else solution)
    if not numbers:
        return None
    sign, digits = numbers[0 if mark else -1]
    return Decimal(sign + digits.replace(",", ""))


def _object_in(text: str) -> dict[str, Any]:
    try:
        read, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except (ValueError, RecursionError):
        return {}
    return read


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. A sentence of only white space has the empty word, as in
    `rouge`."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(ours: list[str], theirs: list[str]) -> Iterator[str]:
    """Yield the words of a longest common subsequence.

    If several subsequences are longest, the result depends on the order of the arguments. With this
    order, and if no word of `theirs` is repeated, it is the same as in `rouge`.
    """
    for operation in LCSseq.opcodes(ours, theirs):
        if operation.tag == "equal":
            yield from theirs[operation.dest_start : operation.dest_end]


_SCORES: Final[Mapping[Metric, Callable[[str, str], float]]] = {
    Metric.F1: f1,
    Metric.ROUGE_L: rouge_l,
    Metric.EDIT_SIMILARITY: edit_similarity,
    Metric.EXACT_NUMBER: exact_number,
    Metric.COUNT: count,
    Metric.RETRIEVAL: retrieval,
    Metric.JSON_VALUES: json_values,
    Metric.SAME: same,
}
