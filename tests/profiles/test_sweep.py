"""The sweep measures what the oracle computes, from one prefix pass per starting layer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from measuring_parts import bench_of, judge, sweep
from shipped import SHIPPED, Shipped
from transformers import DynamicCache

from benchmarks.oracle import decode, partial_prefill
from cachetree.ids import EMPTY_SPAN, Span
from cachetree.planning import EMap
from profiles.answerers import answerers
from profiles.compute.examination import FIRST_TOKENS, Examination
from profiles.compute.fitting import fit_maps
from profiles.compute.layered import LayeredModel
from profiles.compute.measuring import measure, places_swept, screening_steps
from profiles.compute.models import Pair
from profiles.compute.study import TRAIN, DocumentPasses, tokens_kept
from profiles.data.documents import Document
from profiles.evidence import BaselineKind
from profiles.stats.choice import (
    baselines,
    choose,
    critical_runs,
    grid,
    sensitive_first,
    shortlist,
    split_runs,
)
from profiles.stats.measured import Candidate, Measured
from tools.pairs.questions import DATA, read_documents

NUM_LAYERS = 12
NUM_DOCUMENTS = 8


@dataclass(frozen=True)
class SweptPair:
    """A shipped pair, and every block of it measured on some training questions."""

    shipped: Shipped
    pair: Pair
    documents: Sequence[Document]
    swept: Measured
    passes: list[int]
    """Number of prefix passes in each step that was made."""


@pytest.fixture(
    scope="module",
    params=[
        SHIPPED[0],
        # Its shipped profile is checked, and verified on unseen documents, without this.
        pytest.param(SHIPPED[1], marks=pytest.mark.slow),
    ],
    ids=lambda it: it.name,
)
def swept_pair(request) -> SweptPair:
    shipped: Shipped = request.param
    pair = shipped.load()
    documents = read_documents(DATA / "train.jsonl", pair.tokenizer)[:NUM_DOCUMENTS]
    passes: list[int] = []
    with bench_of(pair, documents) as bench:
        bench = replace(bench, tick=lambda entry, is_new: passes.append(entry.passes))
        swept = sweep(bench, documents, grid(pair.num_layers, 1), pruned=False)
    return SweptPair(shipped, pair, documents, swept, passes)


def mean(contexts) -> float:
    return fmean(value for context in contexts for value in context)


def qualities(scores) -> list[float]:
    return [score.quality for context in scores for score in context]


def kl_of(scores) -> float:
    return fmean(score.kl for context in scores for score in context)


def test_a_context_takes_a_pass_for_every_layer_and_the_senders(swept_pair):
    num_documents = len(swept_pair.documents)
    # Both models; each layer alone, and blocks from 0, need none of their own.
    assert swept_pair.passes == [2, 0, 0, *[1] * (NUM_LAYERS - 1)] * num_documents
    assert sum(swept_pair.passes) == num_documents * (NUM_LAYERS + 1)


def test_every_block_is_measured_on_every_question(swept_pair):
    swept = swept_pair.swept
    assert set(swept.blocks) == set(grid(NUM_LAYERS, 1))
    num_questions = sum(len(it.questions) for it in swept_pair.documents)
    assert all(len(qualities(scores)) == num_questions for scores in swept.blocks.values())
    assert len(swept.layers) == NUM_LAYERS


def test_all_layers_are_a_full_prefill(swept_pair):
    swept = swept_pair.swept
    assert kl_of(swept.blocks[Span(0, NUM_LAYERS)]) < 1e-6
    assert fmean(qualities(swept.blocks[Span(0, NUM_LAYERS)])) == mean(swept.full_prefill)


def test_blocks_from_corrected_e_stay_as_close_as_the_gate_will_find_them():
    pair = SHIPPED[0].load()
    documents = read_documents(DATA / "train.jsonl", pair.tokenizer)[:4]
    with bench_of(pair, documents) as bench:
        swept = sweep(bench, documents, [*grid(NUM_LAYERS, 3), Span(2, 5)], pruned=True)
        models = bench.sender.model, bench.receiver.model
        contexts = (DocumentPasses(*models, it.prefix, [2, 3], [2, 3]) for it in documents)
        maps = fit_maps(contexts, [2, 3], torch.float32, "cpu")
        assert {it.layer for it in maps} == {2, 3}
        bench = replace(bench, corrections={it.sha256: maps[it] for it in maps})
        e_map_at = {it.layer: it for it in maps}
        blocks = [Span(2, 5), Span(3, 6), Span(3, 9)]
        plans = [Candidate(runs=(it,), e_map=e_map_at[it.start]) for it in blocks]
        steps = screening_steps(documents, plans, pruned=True)
        screened = measure(bench, TRAIN, documents, steps)
        screened_scores = {it: screened.candidates[it] for it in plans}
        judged = judge(bench, documents, plans, "train").candidates
        is_new: list[bool] = []
        again = replace(bench, tick=lambda _, new: is_new.append(new))
        assert measure(again, TRAIN, documents, steps) == screened
    assert not any(is_new) and len(is_new) == len(steps)
    for candidate, scores in screened_scores.items():
        assert kl_of(scores) == pytest.approx(kl_of(judged[candidate]), abs=1e-5)
        assert kl_of(scores) < kl_of(swept.blocks[candidate.block])


def test_one_layer_dominates(swept_pair):
    losses = [
        mean(swept_pair.swept.full_prefill) - fmean(qualities(it)) for it in swept_pair.swept.layers
    ]
    assert sensitive_first(swept_pair.swept.layers)[0] == losses.index(max(losses))
    assert max(losses) > 0.5


def test_shortlist_has_the_block_that_would_win_among_all(swept_pair):
    """The shortlist is chosen by KL alone, and the winner from all blocks with decoded answers."""
    swept = swept_pair.swept
    blocks = {it: of for it, of in swept.candidates.items() if 0 < len(it) < NUM_LAYERS}
    listed = shortlist(swept)
    assert len(listed) < 0.3 * len(blocks), "a list of everything proves nothing"
    own = swept.full_prefill
    everything = choose(blocks, own, [range(len(own))], 0.05)
    assert everything.expected is not None
    few = choose({it: blocks[it] for it in listed}, own, [range(len(own))], 0.05)
    assert few.expected == everything.expected


def test_a_pruned_sweep_decodes_full_reuse_alone_and_measures_the_same(swept_pair):
    shipped, documents = swept_pair.shipped, swept_pair.documents[:1]
    pair = shipped.load()
    with bench_of(pair, documents) as bench:
        swept = sweep(bench, documents, grid(NUM_LAYERS, 1), pruned=True)
    assert swept.full_reuse == swept_pair.swept.full_reuse[:1]
    for measured, expected in (
        (swept.layers[4], swept_pair.swept.layers[4]),
        (swept.blocks[Span(2, 5)], swept_pair.swept.blocks[Span(2, 5)]),
    ):
        for got, want in zip(measured[0], expected[0], strict=True):
            assert got.quality is None
            assert got.kl == pytest.approx(want.kl, abs=1e-5)


def test_every_block_is_measured_on_the_first_contexts_of_each_task(swept_pair):
    documents = list(swept_pair.documents) * 5
    other = [replace(it, task=replace(it.task, name="other")) for it in documents[:3]]
    assert places_swept([*documents, *other], pruned=False) == list(range(43))
    assert places_swept([*documents, *other], pruned=True) == [*range(12), 40, 41, 42]


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_scores_are_the_oracles(shipped):
    """The blocks are random. The message has the seed for which a score differs."""
    seed = random.randrange(1000)
    pair = shipped.load()
    document = read_documents(DATA / "train.jsonl", pair.tokenizer)[seed % 24]
    with bench_of(pair, [document]) as bench:
        receiver = bench.receiver
        swept = sweep(bench, [document], grid(NUM_LAYERS, 1), pruned=False)
    prefix = torch.tensor([document.prefix])
    picked = random.Random(seed).sample(grid(NUM_LAYERS, 1), 5)
    for block in [*picked, EMPTY_SPAN]:
        kv = partial_prefill(pair.receiver, pair.sender, prefix, block)
        own_kv = partial_prefill(pair.receiver, pair.receiver, prefix, EMPTY_SPAN)
        scores = swept.blocks[block][0] if len(block) else swept.full_reuse[0]
        for question, score in zip(document.questions, scores, strict=True):
            suffix = torch.tensor([question.suffix])
            own = until_end(decode(pair.receiver, own_kv, suffix, 8).ids, receiver.ends)
            text = until_end(decode(pair.receiver, kv, suffix, 8).ids, receiver.ends)
            expected = logprobs(pair.receiver, own_kv, question.suffix, own)
            got = logprobs(pair.receiver, kv, question.suffix, own)
            kl = (expected.exp() * (expected - got)).sum(-1).mean()
            where = f"seed {seed}, block {block}, {question.name}"
            assert score.kl == pytest.approx(float(kl), abs=2e-4), where
            tv = (expected.exp() - got.exp()).abs().sum(-1).mean() / 2
            assert score.tv == pytest.approx(float(tv), abs=2e-4), where
            index = document.questions.index(question)
            assert score.quality == receiver.quality(document, index, tuple(text)), where


def test_total_variation_is_of_an_answers_first_tokens(first):
    """Only the tokens that the drift guard compares count, even in a longer answer."""
    pair, document = first
    sender, receiver = answerers(pair, [document], 2.0)
    receiver = replace(receiver, ends=frozenset())
    theirs, own = (it.model.prefix(document.prefix, ()).kv for it in (sender, receiver))
    examined = []
    for most in (FIRST_TOKENS, FIRST_TOKENS + 4):
        asked = replace(document, task=replace(document.task, max_new=most))
        examination = Examination(receiver, asked, own, receiver.answer(asked, own))
        examined += examination.examine([theirs], [(0,) * NUM_LAYERS], is_decoded=False)
    for short, longer in zip(*examined, strict=True):
        assert longer.tv == pytest.approx(short.tv, abs=1e-5)
        assert longer.kl != pytest.approx(short.kl, rel=1e-2), "it has no more tokens"


def until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    stops = [i for i, token in enumerate(ids) if token in ends]
    return ids[: stops[0] + 1] if stops else ids


def logprobs(model, prefix, suffix, answer):
    """Return the log-probabilities at the answer's tokens, `[tokens, vocabulary]`."""
    cache = DynamicCache(prefix, config=model.config)
    ids = torch.tensor([[*suffix, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache).logits[0]
    return logits[len(suffix) - 1 : -1].float().log_softmax(-1)


def test_a_pair_has_the_properties_of_its_kind(swept_pair):
    """The properties are those of the method, and every training by the recipe has to show them."""
    swept = swept_pair.swept
    full, sender = mean(swept.full_prefill), mean(swept.sender)
    assert full - sender >= 0.4
    assert fmean(qualities(swept.full_reuse)) <= 0.5 * full
    small = [fmean(qualities(it)) for block, it in swept.blocks.items() if len(block) <= 5]
    assert max(small) >= 0.95 * full


def test_critical_layers_are_joined_to_runs():
    assert critical_runs([4, 2, 3, 7]) == (Span(2, 5), Span(7, 8))


def test_a_block_is_split_into_runs_of_nearly_equal_length():
    assert split_runs(Span(2, 7), 2) == (Span(2, 5), Span(5, 7))
    assert split_runs(Span(2, 5), 3) == (Span(2, 3), Span(3, 4), Span(4, 5))


def test_baselines_are_at_the_frontiers_sizes():
    blocks = (Span(4, 5), Span(2, 5), Span(0, 12))
    frontier = [Candidate(runs=(it,)) for it in blocks]
    best = frontier[1]
    made = baselines(frontier, best, list(range(12)))
    layers = sorted((it.kind.value, round(it.recomputed_layers(12), 6)) for it in made)
    assert layers == [
        ("cacheblend", 1), ("cacheblend", 3),
        ("critical_layers", 1), ("critical_layers", 3),
        ("split_block", 3), ("split_block", 3),
    ]  # fmt: skip
    assert {it.runs[0].start for it in made if it.kind is BaselineKind.SPLIT_BLOCK} == {2}
    corrected = replace(best, e_map=EMap(layer=2, dtype="float32", sha256="00"))
    assert baselines(frontier, corrected, list(range(12))) == made[:-2]


@pytest.fixture(scope="module")
def first() -> tuple[Pair, Document]:
    pair = SHIPPED[0].load()
    return pair, read_documents(DATA / "train.jsonl", pair.tokenizer)[0]


def recomputed(blended, theirs) -> list[set[int]]:
    """Return the tokens with KV that differs from the sender's, by layer."""
    return [
        set((ours[0] != given[0]).any(-1).any(1)[0].nonzero()[:, 0].tolist())
        for ours, given in zip(blended, theirs, strict=True)
    ]


def test_cacheblend_keeps_the_tokens_whose_kv_differed_most_at_the_layer_before(first):
    pair, document = first
    sender, receiver = LayeredModel(pair.sender), LayeredModel(pair.receiver)
    theirs, own = (it.prefix(document.prefix, ()).kv for it in (sender, receiver))
    num_tokens = len(document.prefix)
    num_recomputed = [num_tokens, 40, 40, 20, *[5] * 7, 0]
    blended = receiver.blend(document.prefix, num_recomputed, theirs)
    tokens = recomputed(blended, theirs)
    assert [len(it) for it in tokens] == num_recomputed
    assert all(later <= before for before, later in pairwise(tokens))
    for got, want in zip(blended[0], own[0], strict=True):
        assert torch.allclose(got, want, atol=1e-5), "the first layer is the receiver's own"
    for layer in (0, 2):
        far = sum(
            (a - b).square().sum((0, 1, 3))
            for a, b in zip(blended[layer], theirs[layer], strict=True)
        )
        assert set(far.topk(num_recomputed[layer + 1]).indices.tolist()) == tokens[layer + 1]


def test_cacheblend_of_all_tokens_is_the_receivers_own_and_of_none_begins_with_it(first):
    pair, document = first
    sender, receiver = LayeredModel(pair.sender), LayeredModel(pair.receiver)
    theirs, own = (it.prefix(document.prefix, ()).kv for it in (sender, receiver))
    num_tokens = len(document.prefix)
    for num_own in (NUM_LAYERS, 1):
        num_recomputed = [num_tokens] * num_own + [0] * (NUM_LAYERS - num_own)
        blended = receiver.blend(document.prefix, num_recomputed, theirs)
        for layer in range(NUM_LAYERS):
            want = own[layer] if layer < num_own else theirs[layer]
            assert all(
                torch.allclose(a, b, atol=1e-4) for a, b in zip(blended[layer], want, strict=True)
            )


@pytest.mark.parametrize("share", [0.05, 1 / 12, 0.25, 0.5, 0.9, 1.0])
def test_a_blend_takes_the_share_of_compute_that_was_asked_for(share):
    """The first layer is an exception: the blend always recomputes all of it."""
    num_recomputed = tokens_kept(share, 1000, NUM_LAYERS)
    assert num_recomputed[0] == 1000 and all(
        later <= before for before, later in pairwise(num_recomputed)
    )
    assert sum(num_recomputed) == pytest.approx(
        max(1000, share * NUM_LAYERS * 1000), abs=NUM_LAYERS
    )
    if 1 / 12 < share < 0.8:
        assert num_recomputed[1] > 1.2 * sum(num_recomputed[1:]) / 11 > num_recomputed[-1]


def test_every_transition_costs_quality():
    """The same layers are recomputed with more and more reloads of the sender's E, as in figure 10
    of the paper."""
    pair = SHIPPED[0].load()
    documents = read_documents(DATA / "train.jsonl", pair.tokenizer)[:4]
    block = Span(2, 5)
    whole, halves, alone = (Candidate(runs=split_runs(block, parts)) for parts in (1, 2, 3))
    everything, nothing = Candidate(share=1.0), Candidate(share=1e-9)
    with bench_of(pair, documents) as bench:
        judged = judge(bench, documents, [whole, halves, alone, everything, nothing])
        # Sender, own, starts 2, 3 and 4, two blends.
        assert bench.journal.num_passes == len(documents) * 7
        again = judge(bench, documents, [whole, halves, alone, everything, nothing])
        assert bench.journal.num_passes == len(documents) * 7, "what it has is not made again"
    assert again == judged
    kl = {it: kl_of(scores) for it, scores in judged.candidates.items()}
    assert kl[whole] < kl[halves] and kl[whole] < kl[alone]
    assert kl[everything] < 1e-5, "all tokens at all layers are a full prefill"
    assert kl[nothing] == pytest.approx(kl_of(judged.full_reuse), rel=0.2)
