"""Plans of several runs of layers, as the baselines of a profile have them, measured in real
passes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from measuring_parts import bench_of, judge
from shipped import DATA, SHIPPED
from test_room import make_document

from benchmarks.oracle import decode, prefill, recompute
from cachetree import ConfigError, Span
from profiles.answerers import answerer_of, answerers
from profiles.compute.examination import Answerer, Examination
from profiles.compute.measuring import judging_steps, sweep_steps
from profiles.compute.models import Pair
from profiles.data.documents import Document
from profiles.stats.choice import critical_runs, grid
from profiles.stats.measured import Candidate
from tools.pairs.questions import read_documents

NUM_LAYERS = 12


@pytest.fixture(scope="module")
def pair() -> Pair:
    return SHIPPED[1].load()


def document_of(pair: Pair, number: int) -> Document:
    return read_documents(DATA / "train.jsonl", pair.tokenizer)[number]


def test_quality_has_as_many_digits_as_a_profile_keeps():
    """A reader of the profile can recompute the verdict only from the same digits."""
    says = SimpleNamespace(decode=lambda *_, **__: "w5 w6")
    answerer = Answerer(model=None, tokenizer=says, ends=frozenset(), room=None)
    assert answerer.quality(make_document(32, 1), 0, ()) == 0.6667, "two thirds of F1"


def test_scores_are_the_oracles(pair):
    """The layers are random. The message has the seed for which a score differs."""
    seed = random.randrange(1000)
    picked = random.Random(seed)
    document = document_of(pair, seed % 24)
    layers = [picked.sample(range(NUM_LAYERS), number) for number in (2, 4, 7)]
    plans = [Candidate(runs=critical_runs(it)) for it in (*layers, range(NUM_LAYERS))]
    with bench_of(pair, [document]) as bench:
        receiver, judged = bench.receiver, judge(bench, [document], plans, "some")
    ids = torch.tensor([document.prefix])
    theirs = prefill(pair.sender, ids)
    nothing = [(k[:, :, :0], v[:, :, :0]) for k, v in theirs.kv]
    for plan in plans:
        kv = dict(enumerate(theirs.kv))
        for run in plan.runs:
            own = pair.receiver.get_input_embeddings()(ids)
            kv |= recompute(pair.receiver, theirs.e[run.start] if run.start else own, run, nothing)
        for index, question in enumerate(document.questions):
            suffix = torch.tensor([question.suffix])
            written = decode(pair.receiver, list(kv.values()), suffix, 8).ids
            stops = [i for i, token in enumerate(written) if token in receiver.ends]
            text = written[: stops[0] + 1] if stops else written
            expected = receiver.quality(document, index, tuple(text))
            quality = judged.candidates[plan][0][index].quality
            assert quality == expected, f"seed {seed}, {plan.runs}, {question.name}"


def test_logits_that_are_not_finite_end_the_run(pair):
    """A journal could not tell such scores from answers that were not decoded."""
    document = document_of(pair, 0)
    _, receiver = answerers(pair, [document], 2.0)
    own = receiver.model.prefix(document.prefix, ()).kv
    examination = Examination(receiver, document, own, receiver.answer(document, own))
    broken = [(keys, values * torch.inf) for keys, values in own]
    mixture = (0,) * NUM_LAYERS
    with pytest.raises(ConfigError, match=r"not finite in torch\.float32 .*--dtype bfloat16"):
        examination.examine([broken], [mixture], is_decoded=True)
    assert examination.examine([own], [mixture], is_decoded=True)[0][0].tv < 1e-3


def test_a_distance_is_1_at_most_however_sums_are_rounded(pair, monkeypatch):
    """A distance above 1 would leave the drift guard without a bound."""
    document = document_of(pair, 0)
    _, receiver = answerers(pair, [document], 2.0)
    own = receiver.model.prefix(document.prefix, ()).kv
    examination = Examination(receiver, document, own, receiver.answer(document, own))
    drawn = 3 * torch.randn(50, 2, 32_000, generator=torch.Generator().manual_seed(2))
    drawn[:, 0, :16_000] -= 40
    drawn[:, 1, 16_000:] -= 40
    likely, got = drawn.log_softmax(-1).exp().unbind(1)
    apart = drawn[((likely - got).abs().sum(-1) / 2).argmax()]

    def logits(_: object, streams: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model's own streams, or of the streams of a mixture."""
        return apart[streams.dim() - 2].expand(*streams.shape[:-1], -1)

    monkeypatch.setattr(type(receiver.model), "logits", logits)
    (scores,) = examination.examine([own], [(0,) * NUM_LAYERS], is_decoded=False)
    assert {it.tv for it in scores} == {1.0}


def test_an_answer_ends_where_either_file_says(pair, monkeypatch):
    """A server uses the end tokens of config.json and of generation_config.json."""
    monkeypatch.setattr(pair.receiver.config, "eos_token_id", 7)
    monkeypatch.setattr(pair.receiver.generation_config, "eos_token_id", [5, 6])
    answerer = answerer_of(pair.receiver, pair.tokenizer, [document_of(pair, 0)])
    assert answerer.ends == {5, 6, 7, pair.tokenizer.eos_token_id}


def test_no_more_layers_are_kept_than_the_model_has(pair):
    """Passes that several candidates need run once, if there is room to keep their layers."""
    document = document_of(pair, 0)
    plans = [
        Candidate(runs=(Span(2, 5), Span(7, 8), Span(8, 9))),
        Candidate(runs=(Span(2, 4), Span(8, 9), Span(9, 10))),
        Candidate(runs=tuple(Span(it, it + 1) for it in range(NUM_LAYERS))),
    ]
    with bench_of(pair, [document]) as bench:
        judge(bench, [document], plans, "some")
        # Passes: both models; [2, 5), 7, 8; then 9. While [2, 5) is kept, there is no room for all
        # layers. So they are recomputed, except layer 0, which is the receiver's own.
        assert bench.journal.num_passes == 2 + 3 + 1 + (NUM_LAYERS - 1)


def test_no_more_mixtures_are_run_together_than_the_model_has_layers():
    """Room is reserved for as many mixtures as the model has layers."""
    document = make_document(32, 1)
    plans = [Candidate(runs=(Span(0, it % NUM_LAYERS + 1),)) for it in range(3 * NUM_LAYERS)]
    for steps in (
        sweep_steps([document], grid(NUM_LAYERS, 1), NUM_LAYERS, pruned=False),
        judging_steps([document], plans, NUM_LAYERS),
    ):
        assert max(len(it.plans) for it in steps) == NUM_LAYERS
