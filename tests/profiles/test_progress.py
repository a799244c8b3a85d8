"""How long a run will take, before it starts and while it runs."""

import io

import pytest
from rich.console import Console
from test_evidence import COSTS

from cachetree.ids import Span
from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.forecast import Forecast, typical_others, typical_plans
from profiles.progress import Clock, shown
from profiles.stats.choice import grid

FORECAST = Forecast(COSTS, 2.0)
TASK = Task(name="t", template="{context} {input}", metric=Metric.F1, max_new=4)


def document(num_prefix: int, num_questions: int = 2) -> Document:
    question = Question(suffix=(1, 2, 3), reference=(4, 2), answers=("a",), name="q")
    return Document(
        context="00", prefix=(5,) * num_prefix, questions=(question,) * num_questions, task=TASK
    )


def test_every_step_of_the_sweep_has_a_forecast():
    """The references, and the blocks that begin at each of six layers."""
    forecast = FORECAST.sweep([document(32), document(64)], grid(6, 1), pruned=True)
    short, long = forecast[:7], forecast[7:]
    assert len(long) == 7 and all(seconds > 0 for seconds in forecast)
    assert long[2] > short[2] > short[6]
    assert short[0] > short[2], "two passes, and every layer alone"
    coarse_blocks = [Span(0, 3), Span(0, 6), Span(3, 6)]
    coarse = FORECAST.sweep([document(32)], coarse_blocks, pruned=True)
    assert len(coarse) == 3 and sum(coarse) < sum(short)
    decoded = FORECAST.sweep([document(32)], coarse_blocks, pruned=False)
    assert sum(decoded) > sum(coarse)


def judging_s(num_documents: int, plans, others=()) -> float:
    return sum(FORECAST.judging([document(32)] * num_documents, plans, others))


def test_judging_grows_with_the_documents_and_with_the_plans():
    plans = typical_plans(6)
    one = judging_s(1, plans)
    assert judging_s(3, plans) == pytest.approx(3 * one)
    assert judging_s(1, plans[:2]) < one
    others = typical_others(6)
    assert judging_s(1, plans, others) > one
    shown = judging_s(50, plans, others) - judging_s(50, plans)
    assert shown < 49 * (judging_s(1, plans, others) - one)


def test_what_is_left_follows_the_speed_so_far():
    now = [0.0]
    clock = Clock(100.0, lambda: now[0])
    assert clock.left_s == 100.0
    clock.done(50.0, False)
    assert (clock.share, clock.left_s) == (0.5, 50.0), "an earlier run's work took no time"
    now[0] = 20.0
    clock.done(10.0, True)
    assert clock.left_s == pytest.approx(80.0), "twice as slow as forecast"
    clock.done(60.0, True)
    assert clock.share == 1.0 and clock.left_s == 0.0


def test_of_what_should_take_no_time_nothing_is_left_however_long_it_takes():
    clock = Clock(0.0)
    clock.done(0.0, True)
    assert (clock.share, clock.left_s) == (1.0, 0.0)


def test_without_a_terminal_there_are_lines(monkeypatch):
    monkeypatch.setattr("profiles.progress.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with shown(Console(file=out), "training", Clock(10.0)) as done:
        done(5.0, False)
    assert out.getvalue().splitlines() == [
        "training: 50%, 5 s left",
        "training: done in 0 s",
    ]
