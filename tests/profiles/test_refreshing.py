"""Plans with refreshed layers: which are measured, what they measure, and where they end up."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from shipped import DATA, SHIPPED

from cachetree.ids import EMPTY_SPAN, Span
from cachetree.planning.profile import Recipe
from profiles.compute.journal import temporary_journal
from profiles.compute.judging import judge
from profiles.compute.models import load_pair
from profiles.compute.study import Bench
from profiles.costs import Repeats
from profiles.data.records import read_records, write_records
from profiles.oracle import decode, partial_prefill
from profiles.profiler import answerers, profile_pair
from profiles.settings import Settings
from profiles.stats.choice import choose, recipes
from profiles.stats.frontier import grid
from profiles.stats.measured import Candidate, Score, Scores
from tools.pairs.questions import OPTIONS, read_documents

NUM_LAYERS = 12
ADAPTERS = SHIPPED[1]
BEST = [Span(4, 5), Span(3, 5), Span(2, 5), Span(1, 5), Span(0, 12)]
RANKING = [4, 3, 2, 1, 0, 5, 6, 7, 8, 9, 10, 11]


def test_few_plans_are_measured_and_each_once():
    found = recipes(BEST, RANKING, 0)
    assert len(found) == len(set(found)) < 30
    for recipe in found:
        assert list(recipe.refreshed) == sorted(recipe.refreshed)
        assert not {*recipe.refreshed} & {*recipe.block}
        assert len(recipe.refreshed) > 1, "a single layer is a block"
    alone = [it.refreshed for it in found if not len(it.block)]
    assert alone == [(3, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 6, 7), tuple(range(12))]
    assert Recipe(block=Span(2, 5), refreshed=(0, 1)) in found, "the most sensitive others"
    assert Recipe(block=Span(2, 5), refreshed=(0, 1, *range(5, 12))) in found
    assert {it.block for it in found} == {EMPTY_SPAN, Span(3, 5), Span(2, 5), Span(1, 5)}


def test_layers_that_do_not_differ_are_not_refreshed():
    assert {layer for it in recipes(BEST, RANKING, 9) for layer in it.refreshed} == {9, 10, 11}
    assert recipes(BEST, RANKING, 12) == []


def test_scores_are_the_oracles():
    """Recipes picked at random; the seed prints where one disagrees."""
    seed = random.randrange(1000)
    picked = random.Random(seed)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "cache_dir": None}
    pair = load_pair(ADAPTERS.sender, ADAPTERS.receiver, **options)
    document = read_documents(DATA / "train.jsonl", pair.tokenizer)[seed % 24]
    sender, receiver = answerers(pair, [document], 2.0)
    plans = [Recipe(refreshed=tuple(range(NUM_LAYERS)))]
    for block in (EMPTY_SPAN, *picked.sample(grid(NUM_LAYERS, 1), 3)):
        others = [layer for layer in range(NUM_LAYERS) if layer not in block]
        refreshed = picked.sample(others, min(len(others), picked.randrange(1, 6)))
        plans.append(Recipe(block=block, refreshed=tuple(sorted(refreshed))))
    with temporary_journal() as journal:
        bench = Bench(sender=sender, receiver=receiver, journal=journal)
        judged = judge(bench, [document], [Candidate(runs=it.runs) for it in plans], "some")
    prefix = torch.tensor([document.prefix])
    for plan in plans:
        kv = partial_prefill(
            pair.receiver, pair.sender, prefix, plan.block, refreshed=plan.refreshed
        )
        scores = judged.candidates[Candidate(runs=plan.runs)][0]
        for index, (question, score) in enumerate(zip(document.questions, scores, strict=True)):
            ids = decode(pair.receiver, kv, torch.tensor([question.suffix]), 8).ids
            stops = [i for i, token in enumerate(ids) if token in receiver.ends]
            text = ids[: stops[0] + 1] if stops else ids
            expected = receiver.quality(document, index, tuple(text))
            assert score.quality == expected, f"seed {seed}, {plan}, {question.name}"


def score_of(quality: float) -> Score:
    return Score(kl=1 - quality, agreement=1.0, own_nll=0.0, reference_nll=0.0, quality=quality)


def plans_of(quality: Mapping[Recipe | Span, float]) -> dict[Recipe, Scores]:
    return {
        it if isinstance(it, Recipe) else Recipe(block=it): [(score_of(value),) * 3] * 24
        for it, value in quality.items()
    }


def test_the_cheapest_plan_that_is_good_enough_is_recommended_whatever_its_kind():
    blocks = {Span(4, 5): 0.3, Span(3, 5): 0.8, Span(2, 5): 0.9, Span(0, 5): 0.98}
    alone, both = Recipe(refreshed=(3, 4)), Recipe(block=Span(2, 5), refreshed=(0, 1))
    beaten = Recipe(refreshed=(1, 2, 3, 4, 5, 6, 7))
    idle = Recipe(block=Span(2, 5), refreshed=(7, 8, 9))
    plans = plans_of(blocks | {alone: 0.5, beaten: 0.6, both: 0.97, idle: 0.97})
    choice = choose(plans, 1.0, 0.05)
    assert choice.expected == both
    assert idle not in choice.frontier, "more work and no better"
    assert [it.work for it in choice.frontier] == sorted(it.work for it in choice.frontier)
    assert {*choice.frontier} == {alone, beaten, both, *(Recipe(block=it) for it in blocks)}
    tried = [Recipe(block=Span(0, 5)), both, *(Recipe(block=Span(i, 5)) for i in (2, 3))]
    assert [*choice.order] == [*tried, alone, Recipe(block=Span(4, 5))], (
        "from most work to least, and without what less work does better"
    )
    plans = plans_of(blocks | {alone: 0.5, both: 0.94})
    assert choose(plans, 1.0, 0.05).expected == Recipe(block=Span(0, 5))


def test_no_more_layers_are_kept_than_the_model_has():
    """Of what candidates have in common, the passes are made once as long as there is room."""
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "cache_dir": None}
    pair = load_pair(ADAPTERS.sender, ADAPTERS.receiver, **options)
    document = read_documents(DATA / "train.jsonl", pair.tokenizer)[0]
    sender, receiver = answerers(pair, [document], 2.0)
    plans = [
        Recipe(block=Span(2, 5), refreshed=(7, 8)),
        Recipe(block=Span(2, 4), refreshed=(8, 9)),
        Recipe(refreshed=tuple(range(NUM_LAYERS))),
    ]
    with temporary_journal() as journal:
        bench = Bench(sender=sender, receiver=receiver, journal=journal)
        judge(bench, [document], [Candidate(runs=it.runs) for it in plans], "some")
        # Both models; [2, 5), 7, 8; then 9. With [2, 5) kept there is no room for all layers, so
        # they are made anew, but for layer 0, which is the receiver's own.
        assert journal.num_passes == 2 + 3 + 1 + (NUM_LAYERS - 1)


def test_models_of_one_base_get_plans_that_refresh(tmp_path: Path):
    found = []
    for name, number in (("train", 6), ("held_out", 6)):
        path = tmp_path / f"{name}.jsonl"
        write_records(read_records(DATA / path.name)[:number], path)
        found.append(str(path))
    settings = Settings(
        sender=ADAPTERS.sender,
        receiver=ADAPTERS.receiver,
        data=(found[0],),
        held_out=(found[1],),
        options=OPTIONS,
        out=tmp_path / "pair.json",
        group=3,
        dtype="float32",
        timing=Repeats(least=1, budget_s=0.0),
    )
    profile = profile_pair(settings, Console(quiet=True))
    assert profile.made.sweep_passes_per_context == NUM_LAYERS // 3 + 1
    assert any(it.refreshed and not len(it.block) for it in profile.refreshes)
    assert all(it.quality is not None and it.num_questions == 6 for it in profile.refreshes)
    on_frontier = [it for it in profile.frontier if it.refreshed]
    assert on_frontier
    assert {it.recipe for it in on_frontier} <= {it.recipe for it in profile.refreshes}
    works = [it.recipe.work for it in profile.frontier]
    assert works == sorted(works)
    tried = [profile.frontier[place] for place in profile.order]
    assert [it.recipe.work for it in tried] == sorted(
        (it.recipe.work for it in tried), reverse=True
    )
    assert [it for it in profile.frontier if it.tasks] == tried[::-1]
    assert [it.recipe for it in profile.blocks] == [Recipe(block=Span(0, NUM_LAYERS))], (
        "two contexts prove nothing"
    )
    assert not profile.passed and profile.recommended is None
