"""Values in a profile that were measured on only some of the held-out contexts."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace
from sample_profile import sample_profile
from test_evidence import COSTS
from test_room import make_document

from cachetree.ids import Span
from profiles.evidence import BaselineKind, Controls, Interval, Shown
from profiles.profiler import is_open
from profiles.report import tables
from profiles.stats.artifact import (
    Data,
    Findings,
    best_of,
    build,
    contradiction,
    longest_used,
    losses_of,
    split_of,
    tv_bound,
)
from profiles.stats.choice import Choice
from profiles.stats.measured import FULL_REUSE, NUM_SHOWN, Candidate, Measured, Score

OLD = sample_profile()
CONTROLS = Controls(num_contexts=24, full_prefill=0.5, no_document=0.05, other_document=0.125)
TRIED, UNASKED = (Candidate(runs=(Span(start, 5),)) for start in (0, 3))
BLEND = Candidate(kind=BaselineKind.CACHEBLEND, share=0.5)
QUALITIES = [1.0] * NUM_SHOWN + [0.0] * NUM_SHOWN
"""Quality of full prefill, by context. The first contexts are easy."""


def measured(*plans: Candidate, some: tuple[Candidate, ...] = ()) -> Measured:
    """Return measurements in which all plans are as good as full prefill. The plans in `some` were
    measured only on the first `NUM_SHOWN` contexts."""
    scores = [[Score(kl=0.0, tv=0.0, quality=it)] for it in QUALITIES]
    return Measured(
        sender=[[0.0]] * len(QUALITIES),
        full_prefill=[[it] for it in QUALITIES],
        candidates=dict.fromkeys([FULL_REUSE, *plans], scores)
        | dict.fromkeys(some, scores[:NUM_SHOWN]),
    )


@pytest.fixture(scope="module")
def profile():
    lengths = [32] * (len(QUALITIES) - 1) + [160]
    return profile_of(lengths, measured(TRIED, some=(UNASKED, BLEND)))


def profile_of(lengths, judged, tolerance=0.05):
    documents = [
        dataclasses.replace(make_document(length, 1), context=str(place))
        for place, length in enumerate(lengths)
    ]
    data = Data(files=(), documents=documents)
    findings = Findings(
        names=("base", "expert"),
        sender=OLD.sender,
        receiver=OLD.receiver,
        first_difference=0,
        train=data,
        held_out=data,
        costs=COSTS,
        swept=measured(),
        tried=measured(TRIED, UNASKED),
        choice=Choice(frontier=[UNASKED, TRIED], order=(TRIED,), expected=TRIED),
        judged=judged,
        controls={documents[0].task: CONTROLS},
        small=OLD.baselines[-1],
    )
    return build(findings, tolerance, OLD.made)


def losses(profile) -> dict[str, str]:
    table = tables.baselines(profile)
    place = table.headers.index("loss")
    return {row[0]: row[place] for row in table.rows}


def test_plan_equal_to_full_prefill_loses_nothing_on_any_contexts(profile):
    """On these contexts full prefill is better than on all contexts."""
    lost_by = losses(profile)
    assert (lost_by["full prefill"], lost_by["CacheBlend"]) == ("0.0", "0.0")
    lost = 100 * (0.5 - OLD.baselines[-1].quality.mean)
    assert lost_by["smaller model"] == f"{lost:.1f}", "it was asked everything"


def test_profile_has_its_controls(profile):
    assert profile.controls.startswith("without the document 10% and with another document 25%")
    assert [it.controls for it in profile.held_out.tasks] == [CONTROLS]
    assert [it.controls for it in profile.train.tasks] == [None], "they are of what judges"


def test_profile_has_the_scores_that_judged(profile):
    assert profile.judged.tasks == (0,) * len(QUALITIES)
    assert profile.judged.full_prefill == tuple((it,) for it in QUALITIES)
    assert profile.judged.plans == (profile.judged.full_prefill,), "of TRIED alone"


def test_values_that_contradict_the_scores_are_named(profile):
    profile = replace(profile, receiver=replace(OLD.receiver, num_layers=COSTS.num_layers))
    assert contradiction(profile, profile.judged) is None
    wrong = replace(profile.judged, plans=(((0.0,),) * len(QUALITIES),))
    assert "its scores give" in contradiction(profile, wrong)
    for changed in ({"reason": "it is good"}, {"passed": True}):
        assert "it says" in contradiction(replace(profile, **changed), profile.judged)
    unproven = replace(profile.blocks[-1], start=1)
    served = replace(profile, blocks=(unproven, *profile.blocks))
    assert "is served" in contradiction(served, profile.judged)
    advised = replace(profile, recommended=profile.blocks[-1])
    assert "it recommends" in contradiction(advised, profile.judged)


def test_run_goes_on_only_if_more_contexts_could_prove_its_first_unproven_plan(profile):
    assert not profile.passed and is_open(profile), "sixteen contexts are too few"
    lengths, judged = [32] * len(QUALITIES), measured(TRIED, some=(UNASKED, BLEND))
    assert not is_open(profile_of(lengths, judged, 0.9)), "it is proven"
    judged.candidates[TRIED] = [[Score(kl=0.0, tv=0.0, quality=0.0)]] * len(QUALITIES)
    assert not is_open(profile_of(lengths, judged)), "it loses too much"


def test_plan_that_was_judged_on_no_context_of_a_task_may_lose_all_of_it():
    own = [[1.0]] * 3
    seen, unseen = losses_of([(0, 1), (2,)], own, own[:2], 0.05)
    assert (seen.num_contexts, unseen.num_contexts, unseen.bound) == (2, 0, 1.0)


def test_values_outside_the_gate_name_their_evidence(profile):
    shown = Shown(num_contexts=NUM_SHOWN, full_prefill=1.0)
    assert [it.shown for it in profile.frontier] == [shown, None]
    assert [it.shown for it in profile.baselines] == [shown, None]
    for table in (tables.frontier(profile), tables.baselines(profile)):
        assert "measured on 8 of the 16 held-out contexts" in table.caption


@pytest.mark.parametrize(("lost", "best"), [((), 2), ((2,), 1), ((1,), 0), ((0, 1, 2), 2)])
def test_comparison_uses_the_size_of_the_recommended_plan(lost, best):
    """The recommended plan is the last that passes before the first that fails, or the one that the
    training split expected."""
    order = tuple(Candidate(runs=(Span(start, 5),)) for start in range(3))
    judged = measured(*order)
    for place in lost:
        worse = [[replace(it, quality=0.0) for it in of] for of in judged.full_reuse]
        judged.candidates[order[place]] = worse
    choice = Choice(frontier=[*order], order=order, expected=order[2])
    documents = [make_document(32, 1)] * len(QUALITIES)
    assert best_of(choice, documents, judged, 0.6) == order[best]


def test_proof_says_how_many_contexts_reach_which_length(profile):
    """One of sixteen contexts is long."""
    said = dict(tables.summary(profile).rows)["used for prompts of"]
    assert said.startswith("up to 48 tokens") and said.endswith("the mean over all lengths")
    rows = {name: cells for name, *cells in tables.data(profile).rows}
    assert rows["contexts as long"] == ["1 reach 40, 1 reach 80, 1 reach 120, 1 reach 160"] * 2
    even = replace(profile.train, prefix_tokens=(32, 48, 80, 160))
    rows = {name: cells for name, *cells in tables.data(replace(profile, train=even)).rows}
    assert rows["contexts as long"][0] == "3 reach 40, 2 reach 80, 1 reach 120, 1 reach 160"
    old = replace(OLD, train=replace(OLD.train, prefix_tokens=()))
    silent, stated = next(cells for name, *cells in tables.data(old).rows if "as long" in name)
    assert silent == "–", "an old one does not say"
    assert stated.endswith("96 reach 108, 13 reach 144")


@pytest.mark.parametrize(("num_long", "longest"), [(19, 48), (20, 176), (1, 48)])
def test_a_profile_is_used_for_prompts_as_long_as_twenty_contexts_have(num_long, longest):
    """Their questions have nine tokens; prompts are counted in whole pages."""
    lengths = [32] * 40 + [160] * num_long
    documents = [
        dataclasses.replace(make_document(length, 2), context=str(place))
        for place, length in enumerate(lengths)
    ]
    assert longest_used(documents, 16) == longest
    task = dataclasses.replace(documents[0].task, name="other")
    twice = [dataclasses.replace(it, task=task) for it in documents[-num_long:]]
    assert longest_used([*documents, *twice], 16) == longest, "two tasks of one context"


def test_a_profile_is_used_by_the_lengths_of_the_contexts_that_judged_its_plans():
    lengths = [160] * NUM_SHOWN + [32] * (len(QUALITIES) - NUM_SHOWN)
    assert profile_of(lengths, measured(TRIED, some=(UNASKED, BLEND)), 0.9).measured_tokens == 48
    assert profile_of(lengths, measured(some=(TRIED, UNASKED, BLEND)), 0.9).measured_tokens == 176


def test_a_context_of_several_tasks_is_counted_and_drawn_once():
    one = make_document(32, 1)
    task = dataclasses.replace(one.task, name="other")
    other = dataclasses.replace(make_document(48, 1), task=task, context=one.context)
    right, wrong = ([Score(kl=0.0, tv=0.0, quality=it)] for it in (1.0, 0.0))
    judged = Measured(
        sender=[[0.0]] * 2, full_prefill=[[1.0], [0.0]], candidates={FULL_REUSE: [right, wrong]}
    )
    for documents in ([one, other], [other, one]):
        assert split_of(Data(files=(), documents=documents), judged).prefix_tokens == (48,)
    split = split_of(Data(files=(), documents=[one, other]), judged)
    assert (split.num_contexts, split.num_questions) == (1, 2)
    assert [it.num_contexts for it in split.tasks] == [1, 1]
    assert split.full_prefill == split.full_reuse == Interval(mean=0.5, low=0.5, high=0.5)


def test_a_context_of_several_tasks_is_one_draw_of_the_drift():
    one, other = make_document(32, 1), dataclasses.replace(make_document(32, 1), context="other")
    still, moved = [Score(kl=0.0, tv=0.0, quality=1.0)], [Score(kl=0.0, tv=1.0, quality=1.0)]
    both = tv_bound([one, other] * 50, [still, moved] * 50)
    assert both == tv_bound([one, other], [still * 50, moved * 50]) > 0.9


def test_an_old_profile_says_no_loss_of_what_stands_on_other_questions():
    baselines = tuple(replace(it, shown=None) for it in OLD.baselines)
    lost_by = losses(replace(OLD, baselines=baselines))
    kinds = "token selection", "critical layers alone", "[2, 5) in 2 runs"
    assert [lost_by[it] for it in kinds] == ["–"] * len(kinds)
    assert "–" not in (lost_by["full reuse"], lost_by["sender alone"], lost_by["smaller model"])
    assert "few of the 96 held-out contexts" in tables.baselines(OLD).caption
