"""A profile's evidence on disk, and what the cost model predicts."""

from __future__ import annotations

import msgspec
import pytest

from cachetree.ids import EMPTY_SPAN, Span
from profiles.evidence import CostModel, HeldOutTime

COSTS = CostModel(
    layer_s=1.0,
    layer_token_s=0.1,
    layer_token2_s=0.01,
    kv_s=0.5,
    kv_token_s=0.02,
    suffix_s=3.0,
    suffix_token_s=0.2,
    suffix_token2_s=0.001,
    load_s=0.25,
    load_byte_s=0.001,
    kv_bytes=4,
    e_bytes=8,
    num_layers=6,
    held_out=(),
)
N, M = 20, 5
LAYER_S = 1.0 + 20 * 0.1 + 400 * 0.01
SUFFIX_S = 3.0 + 5 * 0.2 + 100 * 0.001


def test_full_prefill_is_one_pass_that_loads_nothing():
    assert COSTS.full_prefill_s(N, M) == pytest.approx(6 * (1.0 + 25 * 0.1 + 625 * 0.01))
    assert COSTS.full_prefill_s(0, M) == pytest.approx(6 * (1.0 + 5 * 0.1 + 25 * 0.01))


def test_a_block_ends_in_k_and_v_alone_and_starts_from_e():
    block_s = 2 * LAYER_S + 0.5 + 20 * 0.02
    kv_s, e_s = 0.25 + 3 * 4 * 20 * 0.001, 0.25 + 8 * 20 * 0.001
    assert COSTS.ttft_s((Span(1, 4),), N, M) == pytest.approx(kv_s + e_s + block_s + SUFFIX_S)
    assert COSTS.ttft_s((Span(0, 3),), N, M) == pytest.approx(kv_s + block_s + SUFFIX_S)


def test_full_reuse_only_loads():
    for runs in ((), (EMPTY_SPAN,)):
        assert COSTS.ttft_s(runs, N, M) == pytest.approx(0.25 + 6 * 4 * 20 * 0.001 + SUFFIX_S)


def test_every_transition_loads_e_again():
    one, two = COSTS.ttft_s((Span(1, 3),), N, M), COSTS.ttft_s((Span(1, 2), Span(2, 3)), N, M)
    e_s = 20 * 8 * 0.001
    assert two - one == pytest.approx(e_s + (0.5 + 20 * 0.02) - LAYER_S)


def test_plan_of_several_runs_loads_e_for_each():
    several = (Span(1, 3), Span(0, 1), Span(4, 5))
    compute_s = LAYER_S + 3 * (0.5 + 20 * 0.02)
    # E at 1 and at 4; layer 0 starts from the receiver's own embeddings.
    assert COSTS.moved_bytes(several) == (2 * 4, 2 * 8)
    loads_s = 2 * 0.25 + (2 * 4 + 2 * 8) * 20 * 0.001
    assert COSTS.ttft_s(several, N, M) == pytest.approx(loads_s + compute_s + SUFFIX_S)


@pytest.mark.parametrize(("measured", "error"), [((10.0, 20.0, 5.0), 0.5), ((10.0, 5.0), 0.5)])
def test_the_error_is_the_median_over_held_out_plans(measured, error):
    held_out = tuple(
        HeldOutTime(num_tokens=1, num_suffix=1, start=0, stop=1, predicted_s=10.0, measured_s=it)
        for it in measured
    )
    assert msgspec.structs.replace(COSTS, held_out=held_out).error == pytest.approx(error)
