"""The chosen plan on simulated GPUs keeps the claims of `benchmarks/never_slower.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import never_slower
from benchmarks.never_slower import Server, summary, sweep
from cachetree.planning import Costs


@pytest.mark.long
def test_the_chosen_plan_is_never_slower_than_a_full_prefill_and_near_the_best():
    """Over links from 0.05 to 50 GB/s, 100 to 40,000 tokens, and 0 to 16 fetches beside it."""
    cells = sweep()
    report = summary(cells)
    assert report["num_cells"] == 1040
    assert 0.3 < report["num_reused"] / report["num_cells"] < 0.7, "there are both kinds"
    assert report["of_full"] <= 1.02
    assert report["of_best"] <= 1.10
    assert min(it.of_full for it in cells) < 0.5, "and it pays"


def _without_backlog(costs: Costs) -> Costs:
    return replace(costs, links={at: replace(link, backlog=()) for at, link in costs.links.items()})


def _by_an_average(costs: Costs) -> Costs:
    """Return the seconds per token of a prompt of 200 tokens, as an average over short prompts
    would give them."""
    assert costs.prefill is not None
    token_s = costs.prefill.seconds(0, 100) / 100
    average = replace(costs.prefill, fixed_s=0.0, token_s=token_s, context_s=0.0, curve=())
    layer = replace(average, token_s=token_s / never_slower.NUM_LAYERS)
    return replace(costs, prefill=average, recompute=layer)


def _without_round_trip(costs: Costs) -> Costs:
    return replace(
        costs, links={at: replace(link, fixed_s=0.0) for at, link in costs.links.items()}
    )


@pytest.mark.parametrize("change", [_without_backlog, _by_an_average, _without_round_trip])
def test_what_is_left_out_would_make_it_slower(change, monkeypatch):
    costs = Server.costs
    monkeypatch.setattr(Server, "costs", lambda *args: change(costs(*args)))
    assert summary(sweep(100))["of_full"] > 1.1
