"""Costs that are fitted with a simulated clock, and their predictions. The model's own modules
advance the clock."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_evidence import COSTS
from test_oracle import FAMILIES, NUM_LAYERS, make_model

from cachetree.errors import ConfigError
from cachetree.ids import EMPTY_SPAN, Span
from profiles.compute.layered import LayeredModel
from profiles.costs import (
    Repeats,
    TimedReceiver,
    choose_lengths,
    fit,
    measure_costs,
    time_in_turns,
    trusted,
)
from profiles.evidence import CostModel, HeldOutTime

LENGTHS, HELD_OUT, NUM_SUFFIX = (16, 32, 64, 128), (24, 96), 6
ONCE = Repeats(least=1, most=1)
KV_TOKEN_S, MLP_S, MLP_TOKEN_S, ATTENTION_S, TICK_S = 0.25, 5.0, 1.0, 0.01, 1e-6


class Clock:
    """A clock that advances a little whenever it is read, and by `work`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


def costly_model(clock: Clock) -> LayeredModel:
    """Return a llama in which projections to K, attention and MLPs advance the clock."""
    model = make_model("llama", 1)

    def project(module, inputs, output) -> None:
        clock.work(KV_TOKEN_S * inputs[0].shape[1])

    def attend(module, inputs, named, output) -> None:
        num_queries, mask = named["hidden_states"].shape[1], named["attention_mask"]
        num_keys = num_queries if mask is None else mask.shape[-1]
        clock.work(ATTENTION_S * num_queries * num_keys)

    def feed_forward(module, inputs, output) -> None:
        clock.work(MLP_S + MLP_TOKEN_S * inputs[0].shape[1])

    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(project)
        layer.self_attn.register_forward_hook(attend, with_kwargs=True)
        layer.mlp.register_forward_hook(feed_forward)
    return LayeredModel(model)


def layer_s(num_new: int, num_past: int = 0) -> float:
    """Return the seconds that the hooks add for a layer over new tokens."""
    per_token_s = KV_TOKEN_S + MLP_TOKEN_S + ATTENTION_S * (num_past + num_new)
    return MLP_S + per_token_s * num_new


def measured(progress=lambda _: None, repeats=ONCE) -> CostModel:
    clock = Clock()
    return measure_costs(
        costly_model(clock),
        lengths=LENGTHS,
        held_out_lengths=HELD_OUT,
        num_suffix=NUM_SUFFIX,
        progress=progress,
        repeats=repeats,
        timer=clock,
    )


def test_known_costs_of_modules_are_recovered():
    costs = measured()
    assert costs.layer_s == pytest.approx(MLP_S, rel=1e-3)
    assert costs.layer_token_s == pytest.approx(KV_TOKEN_S + MLP_TOKEN_S, rel=1e-3)
    assert costs.layer_token2_s == pytest.approx(ATTENTION_S, rel=1e-3)
    assert costs.kv_s == pytest.approx(0.0, abs=2 * TICK_S)
    assert costs.kv_token_s == pytest.approx(KV_TOKEN_S, rel=1e-3)
    assert costs.suffix_token2_s == pytest.approx(NUM_LAYERS * ATTENTION_S, rel=1e-2)
    # Attention within the suffix is quadratic in it, which the form has no place for.
    suffix_s = NUM_LAYERS * layer_s(NUM_SUFFIX, 64)
    assert costs.suffix_time_s(64, NUM_SUFFIX) == pytest.approx(suffix_s, rel=0.01)
    # Copies move this clock by a look.
    assert costs.load_s == pytest.approx(TICK_S, rel=1e-3)
    assert costs.load_time_s(1e5) == pytest.approx(TICK_S, rel=1e-3)


def test_costs_are_those_of_the_model():
    costs = measured()
    assert costs.num_layers == NUM_LAYERS
    assert costs.kv_bytes == 2 * 2 * 8 * 4
    assert costs.e_bytes == 32 * 4


def test_held_out_plans_are_measured_at_other_lengths_and_predicted_by_the_fit():
    costs = measured()
    plans = {(it.num_tokens, it.start, it.stop): it for it in costs.held_out}
    assert len(plans) == len(costs.held_out)
    for num_tokens in HELD_OUT:
        blocks = {(start, stop) for n, start, stop in plans if n == num_tokens}
        assert {(0, NUM_LAYERS), (0, 0)} < blocks
        assert len({start for start, _ in blocks}) >= 2
        assert len({stop - start for start, stop in blocks}) >= 4
    for (num_tokens, start, stop), plan in plans.items():
        block = Span(start, stop)
        if len(block) == NUM_LAYERS:
            assert plan.predicted_s == costs.full_prefill_s(num_tokens, NUM_SUFFIX)
        else:
            assert plan.predicted_s == costs.ttft_s((block,), num_tokens, NUM_SUFFIX)
            assert plan.measured_s == pytest.approx(plan.predicted_s, rel=0.01)
        assert plan.measured_s == pytest.approx(expected_s(num_tokens, block), rel=1e-3)


def expected_s(num_tokens: int, block: Span) -> float:
    """Return the seconds of the modules that a plan runs."""
    if len(block) == NUM_LAYERS:
        return NUM_LAYERS * layer_s(num_tokens + NUM_SUFFIX)
    suffix_s = NUM_LAYERS * layer_s(NUM_SUFFIX, num_tokens)
    if not len(block):
        return suffix_s
    return (len(block) - 1) * layer_s(num_tokens) + KV_TOKEN_S * num_tokens + suffix_s


def test_the_same_clock_gives_the_same_costs():
    assert msgspec.json.encode(measured()) == msgspec.json.encode(measured())


def test_a_pass_ends_in_k_and_v_alone():
    costs = measured()
    assert costs.pass_s(40, 3) == pytest.approx(2 * layer_s(40) + 40 * KV_TOKEN_S, rel=1e-3)
    assert costs.pass_s(40, 1) == pytest.approx(40 * KV_TOKEN_S, rel=1e-3)


def test_progress_ends_at_all_however_early_it_stops():
    for budget_s in (0.0, math.inf):
        done: list[float] = []
        measured(done.append, Repeats(least=1, most=3, budget_s=budget_s))
        assert done == sorted(done)
        assert done[-1] == 1.0 and done[0] < 0.1


def test_progress_follows_the_budget_or_the_turns_that_have_to_be():
    """Each of four tasks takes half a second per turn. There are two to eight turns."""
    for budget_s, num_done in ((10.0, 10), (1.0, 8), (math.inf, 32)):
        done: list[float] = []
        now = (at / 2 for at in range(1000)).__next__
        repeats = Repeats(least=2, most=8, budget_s=budget_s)
        time_in_turns([lambda: None] * 4, repeats, done.append, now)
        halfway = done[num_done // 2 - 1]
        assert halfway == pytest.approx(0.5, abs=0.15), (budget_s, done)


def test_real_times_are_finite_and_none_is_missing():
    model = LayeredModel(make_model("llama", 1))
    lengths, held_out = choose_lengths(64, 256, 16, "receiver")
    costs = measure_costs(
        model,
        lengths=lengths,
        held_out_lengths=held_out,
        num_suffix=NUM_SUFFIX,
        progress=lambda _: None,
        repeats=Repeats(least=3, most=3),
    )
    values = [value for name, value in msgspec.structs.asdict(costs).items() if name.endswith("_s")]
    assert len(values) == 10
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert {it.num_tokens for it in costs.held_out} == set(held_out)
    assert all(it.predicted_s > 0 and it.measured_s > 0 for it in costs.held_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_timed_passes_equal_recompute_and_full_prefill(family, dtype):
    model = LayeredModel(make_model(family, 1).to(dtype))
    receiver = TimedReceiver(model, 40, NUM_SUFFIX)
    entering = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(7)).to(dtype)
    made = receiver.recompute(entering, Span(1, 4))
    for got, expected in zip(made, model.recompute(entering, Span(1, 4))[1:4], strict=True):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    if dtype == torch.float32:
        lengths = range(20, 40, 4)
        whole = [receiver.full_prefill(n) for n in lengths]
        assert [receiver.partial_prefill(n, Span(0, NUM_LAYERS)) for n in lengths] == whole
        assert len(set(whole)) > 1


def test_a_load_moves_the_bytes_that_it_is_charged_for():
    receiver = TimedReceiver(LayeredModel(make_model("qwen3", 1)), 40, NUM_SUFFIX)
    one, every = receiver.load(24)
    for part, num_layers in ((one, 1), (every, NUM_LAYERS)):
        loaded = part.run()
        assert isinstance(loaded, torch.Tensor)
        assert tuple(loaded.shape) == (num_layers, 2, 1, 2, 24, 16)
        assert part.terms == (1.0, float(loaded.nbytes))


@pytest.mark.parametrize(
    "block", [EMPTY_SPAN, Span(0, 1), Span(2, 3), Span(4, NUM_LAYERS)], ids=str
)
def test_a_plan_loads_every_layer_that_it_does_not_recompute(block):
    model = LayeredModel(make_model("llama", 1))
    lengths = range(20, 40, 2)
    fresh, loaded = [], []
    for num_tokens in lengths:
        fresh.append(TimedReceiver(model, 40, NUM_SUFFIX).first_token(num_tokens, block))
        receiver = TimedReceiver(model, 40, NUM_SUFFIX)
        receiver.load(num_tokens)[-1].run()
        loaded.append(receiver.first_token(num_tokens, block))
    assert fresh == loaded


@given(
    st.lists(st.floats(1e-6, 1e-3), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
)
def test_the_fit_recovers_what_times_were_made_from(scales, present):
    lengths = np.array([128.0, 256, 512, 1024, 2048])
    terms = np.stack([np.ones(5), lengths, lengths**2], 1)
    typical = terms[2]
    known = np.array(scales) * present / typical
    assert fit(terms, terms @ known) == pytest.approx(known, rel=1e-6, abs=1e-9 / typical.max())


def test_the_fit_recovers_coefficients_from_noisy_times():
    noise = np.random.default_rng(0)
    known = np.array([2e-3, 7e-5, 2e-8])
    lengths = np.tile([128.0, 256, 512, 1024, 2048], 8)
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2], 1)
    times_s = terms @ known * noise.lognormal(0.0, 0.05, len(lengths))
    fitted = np.array(fit(terms, times_s))
    assert fitted == pytest.approx(known, rel=0.25)
    assert terms @ fitted == pytest.approx(terms @ known, rel=0.05)


@given(st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
def test_the_fit_is_the_best_without_negative_coefficients(times_s):
    """The conditions of Karush, Kuhn and Tucker hold: no allowed step improves the fit."""
    lengths = np.array([1.0, 2, 4, 8, 16])
    terms = np.stack([np.ones(5), lengths, lengths**2], 1)
    fitted = np.array(fit(terms, times_s))
    assert (fitted >= 0).all()
    relative = terms / np.array(times_s)[:, None]
    slope = relative.T @ (relative @ fitted - 1.0)
    size = np.abs(relative).sum(0) * 1e-7
    assert (slope >= -size).all()
    assert (np.abs(slope[fitted > 0]) <= size[fitted > 0]).all()


def test_the_fastest_turn_counts_and_turns_go_to_and_fro():
    clock, order = Clock(), []
    seconds = {"a": iter([9.0, 2.0, 3.0]), "b": iter([5.0, 50.0, 4.0])}

    def work(name: str) -> None:
        order.append(name)
        clock.work(next(seconds[name]))

    works = [lambda: work("a"), lambda: work("b")]
    times = time_in_turns(works, Repeats(least=3, most=3), lambda _: None, clock)
    assert times == pytest.approx([2.0, 4.0], abs=1e-4)
    assert "".join(order) == "abbaab"


@pytest.mark.parametrize(("budget_s", "turns"), [(0.0, 2), (25.0, 3), (1000.0, 6)])
def test_turns_end_with_the_budget_but_not_before_the_least(budget_s, turns):
    clock, done, ran = Clock(), [], []

    def work() -> None:
        ran.append(1)
        clock.work(10.0)

    time_in_turns([work], Repeats(least=2, most=6, budget_s=budget_s), done.append, clock)
    assert len(ran) == turns
    assert done[-1] == 1.0


@given(st.integers(16, 200_000), st.integers(64, 200_000), st.sampled_from([1, 16, 48, 64, 256]))
def test_lengths_span_the_data_and_none_is_judged_on_itself(longest, positions, page_size):
    fitted, held_out = choose_lengths(longest, positions, page_size, "receiver")
    top = min(max(longest, 512), positions)
    assert len(set(fitted)) == len(fitted) >= 4
    assert list(fitted) == sorted(fitted)
    assert list(held_out) == sorted(set(held_out))
    assert not set(fitted) & set(held_out)
    assert 0 < fitted[0] < held_out[0] < held_out[-1] < fitted[-1] <= top
    assert fitted[-1] > top - page_size


@pytest.mark.parametrize(
    ("longest", "positions", "page_size", "fitted", "held_out"),
    [
        (8192, 131072, 16, (512, 1024, 2048, 4096, 8192), (1440, 2896, 5792)),
        (304, 1024, 16, (32, 64, 128, 256, 512), (80, 176, 352)),
        (304, 384, 16, (16, 48, 96, 192, 384), (64, 128, 256)),
        (304, 256, 64, (16, 32, 64, 128, 256), (40, 88, 176)),
    ],
)
def test_lengths_are_halves_in_whole_pages_where_those_tell_them_apart(
    longest, positions, page_size, fitted, held_out
):
    assert choose_lengths(longest, positions, page_size, "receiver") == (fitted, held_out)


@pytest.mark.parametrize(("positions", "left"), [(16, 16), (0, 0), (-100, 0)])
def test_a_model_too_short_to_be_timed_is_refused(positions, left):
    """Two questions may be longer than all positions that the model has."""
    says = rf"leave {left} of the smaller model's positions .*, or a model of more positions"
    with pytest.raises(ConfigError, match=says):
        choose_lengths(300, positions, 16, "smaller model")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([0.1], 0.1), ([0.3, 0.12], 0.12), ([0.3, 0.2, 0.21], 0.2), ([0.3, 0.26, 0.4], None)],
)
def test_a_bad_fit_is_made_again_and_a_worse_one_refused(errors, expected):
    about = {"num_tokens": 1, "num_suffix": 1, "start": 0, "stop": 1, "measured_s": 1.0}
    held_out = [HeldOutTime(**about, predicted_s=1 + it) for it in errors]
    fits = iter([msgspec.structs.replace(COSTS, held_out=(it,)) for it in held_out])
    if expected is None:
        with pytest.raises(ConfigError, match=r"the best of 3 fits is wrong by 26% .*25% is acc"):
            trusted(lambda: next(fits), "receiver")
    else:
        assert trusted(lambda: next(fits), "receiver").error == pytest.approx(expected)
    assert not [*fits], "no fit was left out, nor made in vain"
