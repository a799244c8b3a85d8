"""Quality of an answer: token F1 as SQuAD and LongBench count it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_tokens(text: str) -> list[str]:
    """Lower case, no punctuation, no articles, split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the accepted answers, 0 to 1; ValueError where none are accepted."""
    if not answers:
        raise ValueError("token_f1 needs at least one accepted answer")
    return max(_f1(normalised_tokens(prediction), normalised_tokens(a)) for a in answers)


def _f1(predicted: list[str], expected: list[str]) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))
