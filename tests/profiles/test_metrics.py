import pytest

from profiles.metrics import normalised_tokens, token_f1


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
        ("lamp", ["blue kite", "red lamp"], 2 / 3),
    ],
)
def test_token_f1(prediction, answers, expected):
    assert token_f1(prediction, answers) == pytest.approx(expected)


def test_articles_go_but_not_inside_words():
    assert normalised_tokens("a theme, an Anthem; the end") == ["theme", "anthem", "end"]


def test_no_accepted_answer_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        token_f1("red", [])
