"""First pages that prompts share: recognised, computed by the model itself, and exact."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import (
    NUM_PAGES,
    PAGE,
    PLAN,
    Asked,
    FakeMeter,
    keys_of,
    look,
    planner_of,
    request,
    request_of,
    waiting_with,
)
from test_planner import PAGE as PLANNED_PAGE
from test_planner import planned
from test_policy import DEMAND, MEASURED, UNKNOWN, R, S, match, plan_for, reason_for

from cachetree.ids import EMPTY_SPAN, PageHash, Span
from cachetree.planning import Patience, Reason, saving_s
from cachetree.tree.hashing import page_hashes
from sglang_droidspeak.engine import asking, prefixes
from sglang_droidspeak.request.heads import MAX_HEAD, SharedHeads
from sglang_droidspeak.request.planner import Declined
from sglang_droidspeak.store.pool import Held


def pages(*tokens: int) -> list[PageHash]:
    """Return a page for each token."""
    return page_hashes(tokens, 1)


def heads_after(*prompts: tuple[int, ...]) -> SharedHeads:
    heads = SharedHeads()
    for prompt_tokens in prompts:
        heads.note(pages(*prompt_tokens))
    return heads


@pytest.mark.parametrize("num_shared", [1, 2, 3, 10])
def test_a_head_needs_as_many_prompts_as_it_has_pages_and_at_least_two(num_shared):
    shared = tuple(range(100, 100 + num_shared))
    needed = max(2, num_shared)
    prompts = [(*shared, number, number) for number in range(needed)]
    for _ in range(2):  # The same ones again add nothing.
        assert heads_after(*prompts[:-1], *prompts[:-1]).length(pages(*shared, 99)) == 0
    assert heads_after(*prompts).length(pages(*shared, 99)) == num_shared
    assert heads_after(*prompts).length(pages(7, *shared)) == 0


def test_a_conversation_that_grows_is_no_head():
    turns = [tuple(range(100, 100 + length)) for length in range(1, 30)]
    assert heads_after(*turns).length(pages(*turns[-1])) == 0


def test_the_longest_head_counts_and_none_is_longer_than_the_most():
    inner = [(1, 2, 3, 50 + number) for number in range(3)]
    assert heads_after((1, 9), *inner).length(pages(1, 2, 3, 77)) == 3
    assert heads_after((1, 9), *inner).length(pages(1, 8)) == 1
    shared = tuple(range(100, 101 + MAX_HEAD))
    prompts = [(*shared, number) for number in range(MAX_HEAD + 1)]
    assert heads_after(*prompts).length(pages(*shared, 99)) == 0


def test_what_is_known_of_prompts_is_bounded_and_a_used_head_stays():
    heads = heads_after((1, 2), (1, 3))
    for number in range(400):
        heads.note(pages(1, *range(1000 + number, 1064 + number)))
    assert heads.length(pages(1, 4)) == 1
    assert len(heads._next) < 10_000


ASKED = replace(DEMAND, first_approximate=0, num_head=3)
"""Demand of a prompt of ten pages, three of which are a head. A page takes 160 ms in full."""


def test_a_plan_begins_behind_the_head_and_its_price_has_the_head():
    plan = plan_for(match(S), demand=ASKED, costs=MEASURED)
    assert (plan.head, plan.pages) == (Span(0, 3), Span(3, 10))
    loaded = replace(plan, head=EMPTY_SPAN)
    difference_s = saving_s(loaded, ASKED, MEASURED) - saving_s(plan, ASKED, MEASURED)
    assert difference_s == pytest.approx(3 * 0.16)
    unknown = [saving_s(it, ASKED, UNKNOWN) for it in (plan, loaded)]
    assert unknown == [None, None]
    for held, head, start in ((2, Span(2, 3), 3), (4, EMPTY_SPAN, 4)):
        later = plan_for(match(S), demand=replace(ASKED, first_approximate=held))
        assert (later.head, later.pages.start) == (head, start)


def test_what_is_exact_or_an_experiment_has_no_head():
    own = plan_for(match(R), demand=ASKED)
    experiment = plan_for(match(S), demand=replace(ASKED, first_approximate=None))
    assert [(it.head, it.pages.start) for it in (own, experiment)] == [(EMPTY_SPAN, 0)] * 2


def test_a_prompt_that_is_hardly_longer_than_its_head_is_too_short():
    """The outcome is not `on_device`, because the device has no page of the prompt."""
    for min_pages, num_head, held, reason in (
        (2, 9, 0, Reason.TOO_SHORT),
        (2, 9, 5, Reason.ON_DEVICE),
        (1, 12, 0, Reason.TOO_SHORT),
    ):
        demand = replace(ASKED, num_head=num_head, min_pages=min_pages, first_approximate=held)
        assert reason_for(match(S), demand=demand) is reason


def prompt_of(planner: Any, seed: int, **fields: Any) -> Any:
    """Return a prompt with two pages that all prompts share, and two pages of its own."""
    own = range(1000 * seed, 1000 * seed + 2 * PLANNED_PAGE + 1)
    tokens = [*range(2 * PLANNED_PAGE), *own]
    req = request_of(tokens, **fields)
    planner.note(req)
    planner.meet(req)
    return req


def test_a_request_keeps_its_head_and_reads_apart_from_those_before():
    planner, _ = planned(10)
    first, second, third = (prompt_of(planner, seed) for seed in range(1, 4))
    assert [prefixes.num_head(it) for it in (first, second, third)] == [0, 2, 2]
    planner.meet(first)
    assert prefixes.num_head(first) == 0, "all ranks know it alike, whoever looks again"
    places = [prefixes.approximate_of(it) for it in (first, second, third)]
    assert places[0] != places[1] == places[2]
    other = [prompt_of(planner, seed, cache_salt="bob") for seed in (4, 5)]
    assert [prefixes.num_head(it) for it in other] == [0, 2], "a tenant's prompts are its own"


def test_questions_of_operators_and_shadows_teach_nothing():
    planner, _ = planned(10)
    own = SimpleNamespace(custom_params={asking.ANSWERED: 1})
    for seed in range(1, 4):
        assert prefixes.num_head(prompt_of(planner, seed, sampling_params=own)) == 0


BEHIND = replace(PLAN, head=Span(0, 1), pages=Span(1, NUM_PAGES))


@pytest.mark.parametrize("num_there", [0, 1])
def test_slots_of_a_head_are_computed_and_the_others_loaded(num_there):
    """A head that the device has by then is not computed again."""
    cache, req = Asked(), request()
    planner = planner_of(plan=BEHIND, patience=Patience(saving_s=1.0))
    waiting, _ = waiting_with(cache, planner=planner)
    prefixes.lead(req, 1)
    assert look(waiting, req)
    cache.land()
    assert not look(waiting, req)
    keys = keys_of(req)[num_there:]
    assert waiting.num_restorable("r1", keys[0]) == len(keys)
    assert waiting.take("r1", keys, torch.arange(len(keys) * PAGE))
    (load,) = [it.load for it in waiting.start()]
    assert (load.whole, load.at) == (Span(num_there * PAGE, 64), Span(PAGE, 64))
    assert load.slots.tolist() == [*range((1 - num_there) * PAGE, len(keys) * PAGE)]
    assert len(cache.loaded) == 3
    assert prefixes.num_approximate(req) == 3 * PAGE


def test_a_step_counts_a_head_in_full_and_never_loads_a_head_only():
    for step_tokens, num_pages in ((3 * PAGE, 3), (2 * PAGE, 0)):
        cache = Asked()
        planner = planner_of(plan=BEHIND, step_share=0.5, patience=Patience(saving_s=1.0))
        meter = FakeMeter(recompute=None, step_tokens=step_tokens)
        waiting, _ = waiting_with(cache, planner=planner, meter=meter)
        req = request()
        look(waiting, req)
        cache.land()
        look(waiting, req, is_decoding=True)
        assert waiting.num_restorable("r1", keys_of(req)[0]) == num_pages
        assert waiting.step_tokens("r1", 3 * PAGE) == 2 * PAGE


@pytest.mark.parametrize(("num_approximate", "reads"), [(2, False), (3, True)])
def test_a_request_for_which_the_device_has_a_head_only_computes_exact_kv(num_approximate, reads):
    """Other requests may read all pages of such a request."""
    cache, req = Asked(held=Held(0, num_approximate)), request()
    waiting, _ = waiting_with(cache)
    waiting._planner.plan = lambda *_: Declined("no_match")
    prefixes.lead(req, 2)
    look(waiting, req)
    assert prefixes.is_approximate(req) == reads
