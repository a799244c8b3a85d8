"""The profiler computes the same for a block as real servers and the oracle.

`DROIDSPEAK_TEST_SEED` chooses documents and blocks; it is printed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from random import Random

import pytest
import torch
from engine_parts import PAGE, Answer, answer, oracle
from server_parts import servers
from test_mixtures import oracle_logits
from torch import Tensor

from benchmarks.oracle import Generated, partial_prefill, prefill
from cachetree.ids import EMPTY_SPAN, Span
from profiles.compute.examination import Answerer, Examination
from profiles.compute.layered import LayeredModel
from profiles.compute.mixtures import Asked, Mixture
from profiles.compute.models import ModelSource, Pair, load_pair
from profiles.compute.room import Room
from profiles.compute.study import FIRST_NEW, THEIRS, DocumentPasses
from profiles.data.datasets import load_sources
from profiles.data.documents import Document, Question, Tokens, make_documents
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from sglang_droidspeak.cli.ask import state_of
from sglang_droidspeak.fleet.servers import Server
from sglang_droidspeak.request.meta_info import KEY

pytestmark = pytest.mark.server

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"
OPTIONS = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
NUM_DOCUMENTS, NUM_LATER_BLOCKS, MAX_NEW = 2, 3, 8
TOLERANCE = 2e-4
"""Tolerance of log-probabilities between three implementations in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The models, documents and blocks that one seed chooses."""

    seed: int
    documents: list[Document]
    blocks: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Results of the profiler for one question with one block."""

    document: Document
    question: Question
    block: Span
    answer: Tokens
    """Greedy answer with the block."""
    own: Tokens
    """Answer of the receiver without reuse."""
    kl: float
    """KL divergence of the block's distributions from those of full prefill, on `own`, in nats per
    token."""

    @property
    def prompt(self) -> list[int]:
        return [*self.document.prefix, *self.question.suffix]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(ModelSource(path=SENDER), ModelSource(path=RECEIVER))


@pytest.fixture(scope="module")
def drawn(pair: Pair) -> Drawn:
    seed = int(os.environ.get("DROIDSPEAK_TEST_SEED", Random().randrange(1 << 16)))
    random = Random(seed)
    sources = load_sources([str(PAIRS / "data" / "held_out.jsonl")], OPTIONS)
    documents = make_documents(sources, pair.tokenizer, page_size=PAGE, max_prompt_tokens=None)
    num_layers = pair.num_layers
    later = [(i, j) for i in range(1, num_layers) for j in range(i + 1, num_layers + 1)]
    return Drawn(
        seed=seed,
        documents=random.sample(documents, NUM_DOCUMENTS),
        blocks=[
            EMPTY_SPAN,
            Span(0, random.randrange(1, num_layers)),
            *(Span(*it) for it in random.sample(later, NUM_LATER_BLOCKS)),
        ],
    )


@pytest.fixture(autouse=True)
def _said(drawn: Drawn) -> None:
    """Print the seed in each test: pytest shows a shared fixture's output in one test only."""
    print(f"DROIDSPEAK_TEST_SEED={drawn.seed}: blocks {', '.join(map(literal, drawn.blocks))}")


@pytest.fixture(scope="module")
def profiled(pair: Pair, drawn: Drawn) -> list[Profiled]:
    return [it for document in drawn.documents for it in profile(pair, document, drawn.blocks)]


@pytest.fixture(scope="module")
def receiver(drawn: Drawn, tmp_path_factory) -> Iterator[Server]:
    """The receiver's server, beside that of a sender which has read the documents."""
    layers = sorted({block.start for block in drawn.blocks} - {0})
    folder = tmp_path_factory.mktemp("profiled")
    with servers(folder, (SENDER, RECEIVER), {"capture_layers": layers}) as both:
        for document in drawn.documents:
            both.send(document.prefix)
        yield both.receiver


@pytest.mark.alone
def test_the_seconds_saved_are_those_that_a_client_measures(receiver, drawn):
    """The tolerance covers noise of single times."""
    controls = {"reuse": {"block": literal(drawn.blocks[1])}, "full": {"mode": "off"}}
    seconds = dict.fromkeys(controls, 0.0)
    tokens, before_s = [*drawn.documents[0].prefix, 5, 6, 7], counted_s(receiver)
    for _ in range(8):
        for name, asked in controls.items():
            receiver.flush()
            seconds[name] += receiver.stream(tokens, droidspeak=asked, max_new_tokens=1)[0]
    saved_s = counted_s(receiver) - before_s
    print(f"{seconds} by a client; {saved_s} s saved as the server counts")
    assert saved_s == pytest.approx(seconds["full"] - seconds["reuse"], abs=0.25 * seconds["full"])


def counted_s(server: Server) -> float:
    state, _ = state_of(server.url, None)
    return sum(it["saved_s"] - it["lost_s"] for it in state[KEY]["savings"])


def literal(block: Span) -> str:
    return f"{block.start}:{block.stop}" if len(block) else "none"


def profile(pair: Pair, document: Document, blocks: list[Span]) -> Iterator[Profiled]:
    """Measure as the stages of the profiler do: one pass per starting layer, and all mixtures at
    once."""
    sender, model = LayeredModel(pair.sender), LayeredModel(pair.receiver)
    answerer = Answerer(
        model=model, tokenizer=pair.tokenizer, ends=frozenset(), room=Room(rows=8, positions=256)
    )
    passes = DocumentPasses(sender, model, document.prefix, {block.start for block in blocks})
    sources, mixtures = [passes.theirs, passes.own], []
    for block in blocks:
        mixtures.append(mixture_of(block, len(sources), model.num_layers))
        if len(block):
            sources.append(passes.new(Span(block.start, model.num_layers)))
    own = answerer.answer(document, passes.own)
    examination = Examination(answerer, document, passes.own, own)
    scores = examination.examine(sources, mixtures, is_decoded=False)
    for block, mixture, by_question in zip(blocks, mixtures, scores, strict=True):
        asked = [Asked(mixture, question.suffix) for question in document.questions]
        answers = answerer.answer_all(document, sources, asked)
        for i, question in enumerate(document.questions):
            yield Profiled(
                document=document,
                question=question,
                block=block,
                answer=answers[i],
                own=own[i],
                kl=by_question[i].kl,
            )


def mixture_of(block: Span, new: int, num_layers: int) -> Mixture:
    assert new >= FIRST_NEW
    return tuple(new if layer in block else THEIRS for layer in range(num_layers))


def oracle_answer(case: Profiled) -> Generated:
    return oracle(
        RECEIVER,
        SENDER,
        case.prompt,
        block=case.block,
        num_reused=len(case.document.prefix),
        max_new=MAX_NEW,
    )


def reused(server: Server, case: Profiled, tokens: list[int], **options):
    """Return the server's reply with the sender's pages and this block. The server's own tree is
    not used."""
    server.flush()
    reply = answer(server, tokens, droidspeak={"block": literal(case.block)}, **options)
    assert reply.provenance["outcome"] == "reused"
    assert reply.provenance["reused_tokens"] == len(case.document.prefix)
    block = [case.block.start, case.block.stop] if len(case.block) else None
    assert reply.provenance["block"] == block
    return reply


def assert_same_tokens(ids: Tokens, expected: Generated, name: object) -> None:
    """Compare tokens up to the first that differs. There, the token in second place has to be
    nearly as good. Later tokens follow different texts."""
    for i, (token, right) in enumerate(zip(ids, expected.ids, strict=True)):
        if token != right:
            assert expected.margins[i] < TOLERANCE, name
            return


def test_decoded_answers_are_the_servers_and_the_oracles(receiver, profiled):
    for case in profiled:
        expected, name = oracle_answer(case), (case.question.name, case.block)
        reply = reused(receiver, case, case.prompt, max_new_tokens=MAX_NEW)
        assert_same_tokens(case.answer, expected, name)
        assert_same_tokens(tuple(reply.ids), expected, name)
        if tuple(reply.ids) != case.answer:
            continue
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE), name


def test_distances_from_full_prefill_are_the_servers_and_the_oracles(pair, receiver, profiled):
    for case in profiled:
        name = (case.question.name, case.block)
        tokens, start = [*case.prompt, *case.own], len(case.prompt)
        asked = {"max_new_tokens": 1, "logprob_start_len": start - 1}
        asked["top_logprobs_num"] = pair.receiver.config.vocab_size
        receiver.flush()
        full = given(answer(receiver, tokens, droidspeak={"mode": "off"}, **asked), case.own)
        served = given(reused(receiver, case, tokens, **asked), case.own)
        assert case.kl == pytest.approx(distance(full, served), abs=TOLERANCE), name
        prefix_ids = torch.tensor([case.document.prefix])
        suffix_ids = torch.tensor([tokens[len(case.document.prefix) : -1]])
        full, expected = (
            oracle_logits(pair.receiver, kv, suffix_ids)[-len(case.own) :].log_softmax(-1)
            for kv in (
                prefill(pair.receiver, prefix_ids).kv,
                partial_prefill(pair.receiver, pair.sender, prefix_ids, case.block),
            )
        )
        assert case.kl == pytest.approx(distance(full, expected), abs=TOLERANCE), name


def given(reply: Answer, tokens: Tokens) -> Tensor:
    """Return the log-probabilities `[tokens, vocabulary]` by which the server predicted the last
    tokens of a prompt."""
    entries = reply.meta["input_token_logprobs"][-len(tokens) :]
    assert [token for _, token, *_ in entries] == list(tokens)
    rows = reply.meta["input_top_logprobs"][-len(tokens) :]
    by_token = [sorted(row, key=itemgetter(1)) for row in rows]
    logprobs = torch.tensor([[logprob for logprob, *_ in row] for row in by_token])
    own = logprobs[torch.arange(len(tokens)), list(tokens)].tolist()
    assert own == pytest.approx([logprob for logprob, *_ in entries])
    return logprobs


def distance(full: Tensor, other: Tensor) -> float:
    return float((full.exp() * (full - other)).sum(-1).mean())


def test_every_two_blocks_differ_by_more_than_the_tolerance(drawn, profiled):
    """If two blocks were equal, the other tests could pass with a server that ignores the block."""
    kl: dict[Span, list[float]] = {block: [] for block in drawn.blocks}
    for case in profiled:
        kl[case.block].append(case.kl)
    assert {len(values) for values in kl.values()} == {3 * NUM_DOCUMENTS}
    for one, other in itertools.combinations(kl, 2):
        distances = [abs(a - b) for a, b in zip(kl[one], kl[other], strict=True)]
        assert max(distances) > 2 * TOLERANCE, (one, other)
