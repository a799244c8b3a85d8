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
from profiles.stats.frontier import grid

FORECAST = Forecast(COSTS, 2.0)
TASK = Task(name="t", template="{context} {input}", metric=Metric.F1, max_new=4)


def document(num_prefix: int, num_questions: int = 2) -> Document:
    question = Question(suffix=(1, 2, 3), reference=(4, 2), answers=("a",), name="q")
    return Document(
        context="00", prefix=(5,) * num_prefix, questions=(question,) * num_questions, task=TASK
    )


def test_every_step_of_the_sweep_has_a_forecast():
    forecast = FORECAST.sweep([document(32), document(64)], [0, 1], grid(6, 1), pruned=True)
    starts = ["references", *(f"start:{start}" for start in range(1, 6))]
    assert set(forecast) == {(index, step) for index in range(2) for step in starts}
    assert all(seconds > 0 for seconds in forecast.values())
    assert forecast[1, "start:1"] > forecast[0, "start:1"] > forecast[0, "start:5"]
    assert forecast[0, "references"] > forecast[0, "start:1"], "two passes, and every layer alone"
    coarse_blocks = [Span(0, 3), Span(0, 6), Span(3, 6)]
    coarse = FORECAST.sweep([document(32)], [0], coarse_blocks, pruned=True)
    assert sum(coarse.values()) < sum(forecast[0, step] for step in starts)
    decoded = FORECAST.sweep([document(32)], [0], coarse_blocks, pruned=False)
    assert sum(decoded.values()) > sum(coarse.values())


def test_judging_grows_with_the_documents_and_with_the_plans():
    plans = typical_plans(6)
    one = FORECAST.judging([document(32)], plans, ())
    assert FORECAST.judging([document(32)] * 3, plans, ()) == pytest.approx(3 * one)
    assert FORECAST.judging([document(32)], plans[:2], ()) < one
    others = typical_others(6)
    assert FORECAST.judging([document(32)], plans, others) > one
    many = [document(32)] * 50
    shown = FORECAST.judging(many, plans, others) - FORECAST.judging(many, plans, ())
    assert shown < 49 * (FORECAST.judging([document(32)], plans, others) - one)


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
