"""Costs are fitted from passes with times that simulate a device."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cachetree.ids import Span
from cachetree.planning import PrefillCost
from cachetree.planning.prediction import full_prefill_s
from cachetree.planning.speeds import MOST, Margin
from sglang_droidspeak.cost import Fit, Meter
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.forward import BatchForward

SHAPE = PrefillCost.of_sizes(4096)
LENGTHS = (16, 64, 200, 800, 3000, 8000)


def linear(tokens: Span) -> float:
    """Time of a pass on a CPU, or on a GPU without a wait for launches."""
    context = (tokens.start + tokens.stop) / 2
    return 0.002 + len(tokens) * (4e-5 + 2e-9 * context)


def launch_bound(tokens: Span) -> float:
    """Time of a pass on a GPU on which launches take 10 ms, whatever they launch."""
    return max(0.010, linear(tokens))


def served(device, noise: float = 0.0, lengths=LENGTHS, num: int = 200) -> Fit:
    rng, fit = random.Random(7), Fit(lambda: SHAPE)
    for turn in range(num):
        start = rng.choice([0, 0, 4096])
        tokens = Span(start, start + lengths[turn % len(lengths)])
        fit.add([tokens], device(tokens) * rng.lognormvariate(0.0, noise))
    return fit


@pytest.mark.parametrize("device", [linear, launch_bound])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_lengths_that_were_served_are_predicted(device, noise):
    cost = served(device, noise).cost
    assert cost is not None
    for length in LENGTHS:
        tokens = Span(0, length)
        assert cost.seconds(0, length) == pytest.approx(device(tokens), rel=0.12)


@pytest.mark.parametrize("tokens", [Span(0, 5000), Span(0, 16000), Span(8000, 16000)])
def test_what_launches_take_does_not_distort_what_tokens_take(tokens):
    lengths = (16, 32, 64, 128, 256, 800, 3000, 8000)
    cost = served(launch_bound, 0.03, lengths).cost
    assert cost is not None
    found_s = cost.seconds(tokens.start, tokens.stop)
    assert found_s == pytest.approx(launch_bound(tokens), rel=0.05)
    for shorter in (2, 24):
        assert cost.seconds(0, shorter) == pytest.approx(0.010, rel=0.04)


def test_short_prompts_do_not_make_long_ones_dear():
    """An average over tokens and layers was 25 times too long for 8,000 tokens."""
    fit = served(launch_bound)
    for _ in range(1000):
        fit.add([Span(0, 16)], 0.010)
    cost = fit.cost
    assert cost is not None
    assert cost.seconds(0, 8000) == pytest.approx(launch_bound(Span(0, 8000)), rel=0.05)
    assert cost.seconds(0, 16) == pytest.approx(0.010, rel=0.05)


def test_how_wrong_predictions_were_is_told_with_the_next():
    fit, margins = served(linear), []
    for turn in range(60):
        assert fit.cost is not None
        margins.append(fit.cost.margin)
        length = LENGTHS[turn % len(LENGTHS)]
        fit.add([Span(0, length)], linear(Span(0, length)) * (1.3 if turn % 5 == 0 else 1.0))
    assert (margins[0], margins[-1]) == (1.0, pytest.approx(1.3, abs=0.05))


@pytest.mark.parametrize("length", LENGTHS)
def test_one_pass_that_was_held_up_moves_nothing(length):
    fit = served(linear, num=60)
    fit.add([Span(0, length)], 100 * linear(Span(0, length)))
    cost = fit._fit()
    for other in LENGTHS:
        assert cost.seconds(0, other) == pytest.approx(linear(Span(0, other)), rel=0.03)


def test_a_device_that_has_become_slower_is_noticed():
    fit = served(linear)
    for turn in range(12 * len(LENGTHS)):
        length = LENGTHS[turn % len(LENGTHS)]
        fit.add([Span(0, length)], 3 * linear(Span(0, length)))
    cost = fit.cost
    assert cost is not None
    assert cost.seconds(0, 3000) == pytest.approx(3 * linear(Span(0, 3000)), rel=0.1)


def test_passes_of_many_prompts_count_each_with_its_own_context():
    fit = Fit(lambda: None)
    for one in (100, 700, 3000):
        for many in (1, 4):
            tokens = [Span(2000 * i, 2000 * i + one) for i in range(many)]
            took_s = 0.002 + sum(linear(it) - 0.002 for it in tokens)
            for _ in range(3):
                fit.add(tokens, took_s)
    cost = fit.cost
    assert cost is not None
    assert cost.seconds(2000, 2700) == pytest.approx(linear(Span(2000, 2700)), rel=0.02)


def test_until_enough_was_seen_the_prior_gives_the_shape():
    prior = PrefillCost(fixed_s=20.0, token_s=0.4, context_s=2e-5)
    fit = Fit(lambda: prior)
    assert fit.cost is None
    fit.add([Span(0, 1000)], linear(Span(0, 1000)))
    cost = fit.cost
    assert cost is not None
    for length in (100, 4000):
        assert cost.seconds(0, length) == pytest.approx(linear(Span(0, length)), rel=0.05)
    assert cost.knows(4000)
    assert not cost.knows(4001)


def test_a_margin_is_what_one_in_ten_exceeded_within_bounds():
    margin = Margin()
    assert margin.factor == 1.0
    for number in range(100):
        margin.add(1.0 + number % 10 / 50, 1.0)
    assert margin.factor == pytest.approx(1.16, abs=0.021)
    for _ in range(64):
        margin.add(100.0, 1.0)
    assert margin.factor == MOST
    for _ in range(64):
        margin.add(0.1, 1.0)
    assert margin.factor == 1.0


def test_a_longer_prefill_takes_as_many_passes_as_it_is_cut_into():
    cost = PrefillCost(fixed_s=1.0, token_s=0.1, context_s=0.0, most_tokens=100, known_tokens=400)
    assert cost.seconds(0, 250) == pytest.approx(3 + 25)
    assert cost.knows(10_000)


def test_a_meter_knows_what_it_has_seen():
    now_s = [7.0]
    meter = Meter("cpu", 4, 96, SHAPE, lambda: now_s[0])
    with meter.forward([]):
        now_s[0] += 5.0
    assert meter.prefill is None
    assert meter.recompute is None
    assert full_prefill_s(Span(0, 50), meter.prefill) is None
    with meter.forward([Span(0, 96)]):
        now_s[0] += 0.5
    assert full_prefill_s(Span(0, 96), meter.prefill) == pytest.approx(0.5, rel=0.01)
    assert full_prefill_s(Span(0, 960), meter.prefill) == pytest.approx(5.0, rel=0.2), "in steps"
    assert meter.recompute is not None
    assert meter.recompute.seconds(0, 96) == pytest.approx(0.125, rel=0.01), "as in a forward"
    with meter.block([Span(0, 96)], 2.0):
        now_s[0] += 0.5
    assert meter.recompute.seconds(0, 96) == pytest.approx(0.25, rel=0.01)
    assert full_prefill_s(Span(0, 96), meter.prefill) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("blocks", "is_measured"),
    [
        ([Span(2, 5)], True),
        ([Span(2, 5), Span(2, 5)], True),
        ([Span(2, 5), Span(7, 8)], False),
        ([Span(7, 8)], False),
    ],
)
def test_a_recompute_is_measured_where_all_of_it_is_of_one_block(blocks, is_measured):
    """Layers of the batch's other blocks would otherwise count as layers of this one."""
    ran = []
    meter = Meter("cpu", 4, 96, SHAPE)
    forwards: Any = SimpleNamespace(
        _meter=meter,
        _prefill=SimpleNamespace(run=lambda _batch, them: ran.extend(it.block for it in them)),
        _labels=SimpleNamespace(metrics=Metrics(enabled=False)),
    )
    plans = [SimpleNamespace(block=block, e_map="", is_exact=False) for block in blocks]
    source = SimpleNamespace(read_e=lambda *_: None)
    loads = [SimpleNamespace(plan=plan, at=Span(0, 32), source=source) for plan in plans]
    BatchForward._recompute(forwards, None, dict(enumerate(loads)))  # type: ignore[arg-type]
    assert ran == blocks
    assert (meter.recompute is not None) == is_measured


@pytest.mark.parametrize(("device", "prior"), [("cpu", 0.0), ("cuda", 1 / 12e9)])
def test_copies_into_slots_take_what_most_bytes_took(device, prior):
    meter = Meter(device, 4, 96, SHAPE)
    assert meter.copy_byte_s == prior
    for seconds in (1.0, 1.0, 50.0):
        meter.loaded(1_000_000, seconds)
    meter.loaded(1, 1.0)
    assert meter.copy_byte_s == pytest.approx(1e-6)
    for _ in range(3):  # On a device these take their launches.
        meter.loaded(1 << 18, 1.0)
    assert meter.copy_byte_s == pytest.approx(1e-6), "long loads have more bytes"
    for _ in range(12):
        meter.loaded(1_000_000, 2.0)
    assert meter.copy_byte_s == pytest.approx(2e-6)


def test_a_fetch_costs_until_its_end_is_seen():
    now_s = [7.0]
    meter = Meter("cpu", 4, 96, SHAPE, lambda: now_s[0])
    prior_s = meter.notice_s
    assert 0 < prior_s < 0.01
    for late_s, known_s in ((3.0, prior_s), (0.003, 0.003), (0.003, 0.003)):
        meter.noticed(late_s)  # The scheduler stood still at first.
        assert meter.notice_s == known_s
    now_s[0] += 61.0
    assert meter.notice_s == prior_s, "who avoids fetches would not see that they recovered"


@pytest.mark.parametrize(
    ("model", "full_s"),
    [
        pytest.param("adapter", 2.0, id="a slower model by its own passes"),
        pytest.param(None, 1.5, id="a pass of three takes long: the mean, not the median"),
        pytest.param("new", 2.3, id="an unknown model as all that ran, without what warmed up"),
    ],
)
def test_a_mean_prefill_is_what_the_models_passes_took_together(model, full_s):
    now_s = [0.0]
    meter = Meter("cpu", 4, 96, SHAPE, lambda: now_s[0])
    assert meter.mean_prefill_s(Span(0, 96), model) is None
    passes = *[(None, it) for it in (9.0, 1.0, 1.0, 2.5)], *[("adapter", it) for it in (5.0, 2.0)]
    for of, seconds in passes:
        with meter.forward([Span(0, 96)], {of}):
            now_s[0] += seconds
    assert meter.mean_prefill_s(Span(0, 96), model) == pytest.approx(full_s)


def test_passes_of_adapters_that_came_and_went_are_forgotten():
    now_s = [0.0]
    meter = Meter("cpu", 4, 96, SHAPE, lambda: now_s[0])
    for number in range(300):
        with meter.forward([Span(0, 96)], [number]):
            now_s[0] += 1.0 if number else 3.0
    of_all = meter.mean_prefill_s(Span(0, 96), "unknown")
    assert meter.mean_prefill_s(Span(0, 96), 0) == of_all == pytest.approx(1.0)


def test_a_pass_of_several_models_says_nothing_about_one_of_them():
    now_s = [0.0]
    meter = Meter("cpu", 4, 96, SHAPE, lambda: now_s[0])
    for models, seconds in ((["base"], 1.0), (["base", "adapter"], 3.0)):
        with meter.forward([Span(0, 96)], models):
            now_s[0] += seconds
    assert meter.mean_prefill_s(Span(0, 96), "base") == pytest.approx(1.0)
    assert meter.mean_prefill_s(Span(0, 96), "adapter") == pytest.approx(3.0)
