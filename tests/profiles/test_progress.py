"""How long a run will take, before it starts and while it runs."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from test_evidence import COSTS

from cachetree.ids import Span
from profiles.compute.measuring import comparing_steps, judging_steps, sweep_steps
from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.forecast import Forecast, typical_plans
from profiles.progress import left_s, shown
from profiles.settings import Settings
from profiles.stats.choice import grid
from profiles.stats.measured import NUM_SHOWN

FORECAST = Forecast(COSTS, 2.0)
TASK = Task(name="t", template="{context} {input}", metric=Metric.F1, max_new=4)


def document(num_prefix: int, num_questions: int = 2) -> Document:
    question = Question(suffix=(1, 2, 3), draft=(4, 2), answers=("a",), name="q")
    return Document(
        context="00", prefix=(5,) * num_prefix, questions=(question,) * num_questions, task=TASK
    )


def sweep_s(documents, blocks, *, pruned=True) -> list[float]:
    return FORECAST.steps(documents, sweep_steps(documents, blocks, 6, pruned=pruned))


def test_every_step_of_the_sweep_has_a_forecast():
    """The steps are the references, every layer alone, and the blocks that begin at each of six
    layers."""
    forecast = sweep_s([document(32), document(64)], grid(6, 1))
    short, long = forecast[:8], forecast[8:]
    assert len(long) == 8 and all(seconds > 0 for seconds in forecast)
    assert long[3] > short[3], "a pass over a longer prefix"
    assert short[3] > short[7], "a shorter pass, and fewer blocks"
    assert short[0] > short[3], "two passes"
    coarse_blocks = [Span(0, 3), Span(0, 6), Span(3, 6)]
    coarse = sweep_s([document(32)], coarse_blocks)
    assert len(coarse) == 4 and sum(coarse) < sum(short)
    assert sum(sweep_s([document(32)], coarse_blocks, pruned=False)) > sum(coarse)


def judging_s(num_documents: int, plans) -> float:
    documents = [document(32)] * num_documents
    return sum(FORECAST.steps(documents, judging_steps(documents, plans, 6)))


def test_judging_grows_with_the_documents_and_with_the_plans():
    plans, _ = typical_plans(6, 12)
    one = judging_s(1, plans)
    assert judging_s(3, plans) == pytest.approx(3 * one)
    assert judging_s(1, plans[:2]) < one


def test_a_run_is_forecast_to_compare_on_some_contexts_what_it_has_judged_on_all():
    settings, blocks, (_, others) = Settings(out=Path()), grid(6, 1), typical_plans(6, 12)
    few, many = ([document(32)] * it for it in (NUM_SHOWN, 2 * NUM_SHOWN))
    plans, _ = typical_plans(6, settings.plans)
    more_s = sum(FORECAST.steps(many, judging_steps(many, plans, 6))) / 2
    one_s, two_s = (FORECAST.whole(few, it, blocks, settings, few) for it in (few, many))
    assert two_s - one_s == pytest.approx(more_s), "all else is of as many contexts"
    steps = comparing_steps(many, others, 6)
    assert [it.place for it in steps if not it.plans] == [*range(NUM_SHOWN)]


def test_swept_document_gets_both_passes_again():
    documents, (plans, _) = [document(32)] * 2, typical_plans(6, 4)
    steps = judging_steps(documents, plans, 6)
    of_one = len(steps) // 2
    plain = FORECAST.steps(documents, steps)
    swept = {it for it in steps if not it.plans and it.place == 1}
    again = FORECAST.steps(documents, steps, swept)
    passes_s = 2 * COSTS.pass_s(32, 6)
    assert passes_s < again[of_one + 1] - plain[of_one + 1] < 1.5 * passes_s
    again[of_one + 1] = plain[of_one + 1]
    assert again == plain
    assert FORECAST.steps(documents, steps, set(steps)) == plain, "nothing is made"


def test_a_run_that_corrects_e_is_forecast_to_try_its_plans_too():
    settings = Settings(out=Path())
    documents, blocks = [document(32)] * 8, grid(6, 1)
    plain_s, both_s = (
        FORECAST.whole(documents, documents, blocks, replace(settings, e_correction=it), documents)
        for it in (False, True)
    )
    assert 1.4 * plain_s < both_s < 2.5 * plain_s


def test_maps_are_forecast_to_be_fitted_on_the_contexts_that_are_named_for_them():
    settings = Settings(out=Path(), e_correction=True)
    few, blocks = [document(32)], grid(6, 1)
    short_s, long_s = (
        FORECAST.whole(few, few, blocks, settings, [document(it)] * 2) for it in (32, 320)
    )
    passes_s = 4 * (COSTS.pass_s(320, 6) - COSTS.pass_s(32, 6))
    assert long_s - short_s == pytest.approx(passes_s)


def test_remaining_time_follows_the_speed_so_far():
    now = [0.0]
    task = Progress(get_time=lambda: now[0])
    task.add_task("", total=100.0, completed=50.0)
    (step,) = task.tasks
    assert left_s(step, 50.0) == 50.0, "an earlier run's work took no time"
    now[0] = 20.0
    task.advance(step.id, 10.0)
    assert left_s(step, 50.0) == pytest.approx(40.0 * 25 / 15), "twice as slow as forecast"
    task.advance(step.id, 60.0)
    assert left_s(step, 50.0) == 0.0


def test_first_steps_that_differ_do_not_mislead():
    now = [0.0]
    task = Progress(get_time=lambda: now[0])
    task.add_task("", total=100.0)
    (measured_step,) = task.tasks
    for step in range(90):
        now[0] += 1 / 1.5 if step < 10 else 1.0  # Of held-out contexts the first show baselines.
        task.advance(measured_step.id, 1.0)
        really_s = 10 / 1.5 + 90 - now[0]
        assert 0.8 < left_s(measured_step, 0.0) / really_s < 1.25, step


def test_step_that_should_take_no_time_has_no_time_left(monkeypatch):
    monkeypatch.setattr("profiles.progress.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with shown(Console(file=out), "timing", 0.0) as done:
        done(0.0)
    assert out.getvalue() == "timing: done in 0 s\n"


def test_without_a_terminal_there_are_lines(monkeypatch):
    monkeypatch.setattr("profiles.progress.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with shown(Console(file=out), "training", 10.0, 4.0) as done:
        done(0.1)
    assert out.getvalue().splitlines() == [
        "training: 40%, 6 s left",
        "training: 41%, 5 s left",
        "training: done in 0 s",
    ]


def test_a_terminal_shows_a_bar_and_what_is_left():
    out = io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=80), "training", 10.0) as done:
        done(10.0)
    said = out.getvalue()
    assert "training" in said and "100%" in said and "done" in said
