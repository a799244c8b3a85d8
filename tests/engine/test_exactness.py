"""Real servers answer exactly what the oracle computes, for any block, sender and batch."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import pytest
import requests
import torch
from engine_parts import CPU, Answer, answer, free_address, prompt, whole_pages
from struck_parts import scraped
from teams import BASE, HIDDEN, NUM_LAYERS, Checkpoints, Team, literal, random_correction, team_of

from cachetree.corrections import Correction
from cachetree.ids import EMPTY_SPAN, Span
from sglang_droidspeak.fleet.servers import Server

pytestmark = pytest.mark.server

SECOND, RECEIVER = "second", "receiver"
BLOCKS = [EMPTY_SPAN, Span(0, 3), Span(1, 2), Span(2, 5), Span(4, 6), Span(5, 6), Span(0, 6)]
CORRECTED = {
    Span(1, 4): random_correction(1),
    Span(3, 5): random_correction(2),
    Span(3, 4): Correction(torch.zeros(HIDDEN), torch.zeros(HIDDEN, HIDDEN)),
}
"""Blocks of the profile. All begin with corrected E, except the last."""
OFF = {"mode": "off"}
ONE_FAMILY = pytest.mark.parametrize("trio", ["llama"], indirect=True, scope="module")
"""Mark of a test that does not depend on the layers' family."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trio(request, tmp_path_factory) -> Iterator[Team]:
    """Start one or two senders and a receiver of one family, each in its own server."""
    senders = [BASE] if request.param == "qwen3" else [BASE, SECOND]
    folder = tmp_path_factory.mktemp(request.param)
    models = Checkpoints.write(folder, {}, *senders[1:], RECEIVER, kind=request.param)
    addresses = [free_address() for _ in (*senders, RECEIVER)]
    shared = {"host_gb": 0.5}
    specs = [
        models.server(it, listen=at, capture_layers=[*range(1, NUM_LAYERS)], **shared)
        for it, at in zip(senders, addresses, strict=False)
    ]
    receiver = models.server(
        RECEIVER,
        options={**CPU, "enable-metrics": True},
        listen=addresses[-1],
        peers=addresses[:-1],
        profiles=[models.profile(BASE, RECEIVER, CORRECTED)],
        gate="none",
        **shared,
    )
    with team_of(models, *specs, receiver) as team:
        yield team


@pytest.mark.parametrize("block", BLOCKS, ids=literal)
def test_block_equals_the_oracle(trio, block):
    tokens = prompt(200, seed=100 + BLOCKS.index(block))
    trio.send(BASE, tokens)
    reply = trio.receive(RECEIVER, BASE, tokens, block)
    reply.assert_equals(trio.models.expected(RECEIVER, BASE, tokens, block))
    assert reply.provenance["outcome"] == "reused"
    assert reply.provenance["reused_tokens"] == whole_pages(len(tokens))
    assert reply.provenance["exact"] == (block == Span(0, NUM_LAYERS))


def test_blocks_differ_from_each_other_and_from_own_prefill(trio):
    """A server that ignores the block would pass the other tests if all blocks had equal
    answers."""
    tokens = prompt(200, seed=103)
    answers = [trio.models.expected(RECEIVER, BASE, tokens, block) for block in BLOCKS]
    assert len({tuple(round(x, 4) for x in it.logprobs) for it in answers}) == len(BLOCKS)


@pytest.mark.parametrize("block", CORRECTED, ids=literal)
def test_a_block_from_corrected_e_equals_the_oracle(trio, block):
    """The prompt is recomputed chunk by chunk. A map that changes nothing gives the same result as
    no map."""
    tokens = prompt(200, seed=150 + list(CORRECTED).index(block))
    trio.send(BASE, tokens)
    reply = trio.receive(RECEIVER, BASE, tokens, block)
    by = CORRECTED[block]
    reply.assert_equals(trio.models.expected(RECEIVER, BASE, tokens, block, correction=by))
    provenance = reply.provenance
    assert (provenance["outcome"], provenance["exact"], provenance["e_corrected"]) == (
        "reused",
        False,
        True,
    )
    plain = trio.models.expected(RECEIVER, BASE, tokens, block)
    if block == Span(3, 4):
        assert reply.ids == plain.ids
    else:
        assert reply.logprobs != pytest.approx(plain.logprobs, abs=2e-3), "not corrected"


@ONE_FAMILY
def test_one_batch_corrects_e_of_some(trio):
    """Each request uses the map of its own plan. A request with another sender and the same block
    uses none."""
    cases = [(BASE, it) for it in CORRECTED] + [(BASE, Span(2, 5)), (SECOND, Span(3, 5))]
    prompts = [prompt(140 + 21 * i, seed=170 + i) for i in range(len(cases))]
    for (sender, _block), tokens in zip(cases, prompts, strict=True):
        trio.send(sender, tokens)
    with ThreadPoolExecutor(len(cases)) as pool:
        replies = [
            pool.submit(trio.receive, RECEIVER, sender, tokens, block)
            for (sender, block), tokens in zip(cases, prompts, strict=True)
        ]
        for (sender, block), tokens, reply in zip(cases, prompts, replies, strict=True):
            provenance = reply.result().provenance
            by = CORRECTED.get(block) if sender == BASE else None
            assert provenance["e_corrected"] == (by is not None)
            options = {"num_reused": provenance["reused_tokens"], "correction": by}
            expected = trio.models.expected(RECEIVER, sender, tokens, block, **options)
            reply.result().assert_equals(expected)


def test_every_layer_anew_equals_the_receiver_alone(trio):
    tokens = prompt(180, seed=7)
    trio.send(BASE, tokens)
    reused = trio.receive(RECEIVER, BASE, tokens, Span(0, NUM_LAYERS))
    trio.servers[RECEIVER].flush()
    alone = trio.ask(RECEIVER, tokens, droidspeak=OFF)
    assert reused.provenance["outcome"] == "reused"
    assert alone.provenance["outcome"] == "off"
    assert reused.ids == alone.ids
    assert reused.logprobs == pytest.approx(alone.logprobs, abs=2e-4)


def test_own_cache_comes_back_after_a_flush(trio):
    """Sender and receiver are the same model. Its stored KV is exact and needs no profile."""
    tokens = prompt(170, seed=8)
    first = trio.ask(RECEIVER, tokens, droidspeak=OFF)
    trio.watcher.wait_for(tokens, trio.models.whole[RECEIVER])
    trio.servers[RECEIVER].flush()
    again = trio.ask(RECEIVER, tokens)
    assert again.provenance["outcome"] == "own"
    assert again.provenance["exact"]
    assert again.provenance["location"] == "local"
    assert again.ids == first.ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=2e-4)


def test_decoded_tokens_are_part_of_the_shared_context(trio):
    tokens = prompt(150, seed=9)
    spoken = trio.send(BASE, tokens, max_new_tokens=60)
    longer = [*tokens, *spoken.ids, *prompt(20, seed=10)]
    num_reused = (len(tokens) + len(spoken.ids) - 1) // 16 * 16
    assert num_reused > len(tokens)
    block = Span(2, 5)
    reply = trio.receive(RECEIVER, BASE, longer, block)
    assert reply.provenance["reused_tokens"] == num_reused
    reply.assert_equals(trio.models.expected(RECEIVER, BASE, longer, block, num_reused=num_reused))


def test_own_exact_prefix_comes_before_the_senders_pages(trio):
    tokens = prompt(240, seed=11)
    trio.send(BASE, tokens)
    trio.ask(RECEIVER, tokens[:101], max_new_tokens=1, droidspeak=OFF)
    reply = trio.receive(RECEIVER, BASE, tokens, Span(2, 4))
    assert reply.provenance["reused_tokens"] == whole_pages(240) - 96
    reply.assert_equals(trio.models.expected(RECEIVER, BASE, tokens, Span(2, 4), own=96))


@ONE_FAMILY
def test_after_an_answer_that_waits_to_be_published_the_next_server_hits(trio):
    """Both servers have other work meanwhile."""
    is_over = threading.Event()

    def keep_busy(server: Server, seed: int) -> None:
        for number in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
            answer(server, prompt(200, seed=10_000 * seed + number), droidspeak=OFF)

    sender, receiver = trio.servers[BASE], trio.servers[RECEIVER]
    with ThreadPoolExecutor(4) as pool:
        for seed in range(4):
            pool.submit(keep_busy, (sender, receiver)[seed % 2], 1 + seed)
        try:
            for seed in range(700, 710):
                tokens = prompt(150, seed=seed)
                controls = {"publish": "before_reply"}
                answer(sender, tokens, max_new_tokens=1, droidspeak=controls)
                outcome = trio.receive(RECEIVER, BASE, tokens, Span(2, 4)).provenance["outcome"]
                assert outcome.startswith(("reused", "fallback")), outcome
        finally:
            is_over.set()


def test_requests_of_one_batch_do_not_touch_each_other(trio):
    """The batch has different blocks and senders, and requests without reuse. Each request is
    answered as if it were alone."""
    senders = [it for it in trio.servers if it != RECEIVER]
    cases = [
        (senders[i % len(senders)], prompt(130 + 17 * i, seed=200 + i), BLOCKS[i % len(BLOCKS)])
        for i in range(8)
    ]
    for sender, tokens, _block in cases:
        trio.send(sender, tokens)
    plain = [prompt(90 + 31 * i, seed=300 + i) for i in range(3)]
    with ThreadPoolExecutor(len(cases) + len(plain)) as pool:
        replies = [pool.submit(trio.receive, RECEIVER, *case) for case in cases]
        others = [pool.submit(answer, trio.servers[RECEIVER], tokens) for tokens in plain]
        for (sender, tokens, block), reply in zip(cases, replies, strict=True):
            provenance = reply.result().provenance
            assert provenance["outcome"] == "reused"
            # Of the longer ones less, while others decode.
            options = {"num_reused": provenance["reused_tokens"]}
            expected = trio.models.expected(RECEIVER, sender, tokens, block, **options)
            reply.result().assert_equals(expected)
        for tokens, other in zip(plain, others, strict=True):
            assert other.result().provenance["outcome"] == "no_match"
            own = trio.models.expected(RECEIVER, RECEIVER, tokens, EMPTY_SPAN)
            other.result().assert_equals(own)


def test_approximate_kv_is_never_on_offer(trio):
    """Peers see neither the reused pages, nor new tokens after them, nor a continuation of both."""
    tokens = prompt(160, seed=12)
    trio.send(BASE, tokens)
    first = trio.ask(RECEIVER, tokens, max_new_tokens=40)
    assert first.provenance["block"] == [2, 3], "the profile's block, which nobody asked for"
    assert not first.provenance["exact"]
    longer = [*tokens, *first.ids, *prompt(40, seed=13)]
    second = trio.ask(RECEIVER, longer, max_new_tokens=20)
    assert second.meta["cached_tokens"] >= whole_pages(len(tokens)), "from its own radix tree"
    assert not second.provenance["exact"]
    exact = prompt(160, seed=14)
    trio.ask(RECEIVER, exact, max_new_tokens=1)
    trio.watcher.wait_for(exact, trio.models.whole[RECEIVER])
    assert trio.watcher.num_pages(longer, trio.models.whole[RECEIVER]) == 0


def test_a_head_that_prompts_share_is_computed_and_makes_no_answer_approximate(trio):
    """The head has two pages. The first prompt has loaded them, before the head was known."""
    shared = prompt(40, seed=31)
    asked = [[*shared, *prompt(120, seed=32 + number)] for number in range(4)]
    for number, (tokens, num_own, num_cached) in enumerate(
        zip(asked, (0, 32, 32, 160), (144, 112, 144, 0), strict=True)
    ):
        if number < 3:
            trio.send(BASE, tokens)
        reply = trio.ask(RECEIVER, tokens)
        sender, block = (RECEIVER, EMPTY_SPAN) if number == 3 else (BASE, Span(2, 3))
        reply.assert_equals(
            trio.models.expected(RECEIVER, sender, tokens, block, own=num_own % 160)
        )
        provenance = reply.provenance
        assert provenance["approximate_tokens"] == max(0, 144 - num_own), number
        assert (provenance["exact"], reply.meta["cached_tokens"]) == (number == 3, num_cached), (
            number
        )
    repeated = trio.ask(RECEIVER, asked[1]).provenance
    assert (repeated["outcome"], repeated["approximate_tokens"]) == ("on_device", 112)


def test_an_experiment_stays_out_of_the_receivers_own_cache(trio):
    """An experiment is a block that a request names while the gate is off. Its KV serves this
    request only."""
    tokens = prompt(160, seed=15)
    trio.send(BASE, tokens)
    trio.receive(RECEIVER, BASE, tokens, Span(0, 0))
    own = trio.ask(RECEIVER, tokens, droidspeak=OFF)
    assert own.meta["cached_tokens"] == 0
    assert own.provenance["exact"]


def test_mode_off_reads_exact_kv_only(trio):
    """Approximate KV of earlier requests is on the device, and is not read between the chunks of a
    prefill either."""
    tokens = prompt(300, seed=19)
    trio.send(BASE, tokens)
    reused = trio.ask(RECEIVER, tokens)
    assert not reused.provenance["exact"]
    reused.assert_equals(trio.models.expected(RECEIVER, BASE, tokens, Span(2, 3)))
    own = trio.models.expected(RECEIVER, RECEIVER, tokens, Span(0, 0))
    for num_cached in (0, whole_pages(300)):
        alone = trio.ask(RECEIVER, tokens, droidspeak=OFF)
        assert (alone.meta["cached_tokens"], alone.provenance["exact"]) == (num_cached, True)
        alone.assert_equals(own)
    both = trio.ask(RECEIVER, tokens)
    assert both.provenance["exact"], "as many pages as there are approximate ones"
    both.assert_equals(own)


def test_what_is_longer_on_the_device_is_read(trio):
    """The longer prefix may be approximate or exact. Requests without a reason to prefer one read
    it."""
    tokens, longer = prompt(160, seed=20), [*prompt(160, seed=20), *prompt(100, seed=21)]
    trio.send(BASE, tokens)
    trio.ask(RECEIVER, tokens)
    first = trio.ask(RECEIVER, longer)
    assert (first.meta["cached_tokens"], first.provenance["exact"]) == (whole_pages(161), False)
    exact = trio.ask(RECEIVER, longer, droidspeak=OFF)
    assert (exact.meta["cached_tokens"], exact.provenance["exact"]) == (0, True)
    longest = [*longer, *exact.ids, *prompt(50, seed=22)]
    trio.ask(RECEIVER, longest[:-20], droidspeak=OFF)
    second = trio.ask(RECEIVER, longest)
    assert second.provenance["exact"], "the exact pages are more by now"
    second.assert_equals(trio.models.expected(RECEIVER, RECEIVER, longest, Span(0, 0)))


def test_twins_say_what_they_read(trio):
    """Several requests for a document that only the sender has are sent at once. One loads it, and
    the others find it on the device."""
    tokens = prompt(160, seed=23)
    trio.send(BASE, tokens)
    before = num_counted(trio.servers[RECEIVER])
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: trio.ask(RECEIVER, tokens), range(3)))
    for reply in replies:
        reply.assert_equals(trio.models.expected(RECEIVER, BASE, tokens, Span(2, 3)))
        assert not reply.provenance["exact"]
    assert num_counted(trio.servers[RECEIVER]) - before == 3


def told_of(reply: Answer) -> tuple[str, int, bool]:
    provenance = reply.provenance
    return provenance["outcome"], provenance["reused_tokens"], provenance["exact"]


def test_a_new_grammar_costs_no_reuse(trio):
    """SGLang compiles the grammar while the request waits in another queue."""
    tokens = prompt(160, seed=16)
    trio.send(BASE, tokens)
    for attempt in range(3):
        trio.servers[RECEIVER].flush()
        params = {"regex": f"(.|\\n)*|never {attempt}"}
        reply = Answer(
            trio.servers[RECEIVER].generate(tokens, max_new_tokens=4, sampling_params=params)
        )
        assert told_of(reply) == ("reused", whole_pages(160), False)
        assert reply.meta["cached_tokens"] == whole_pages(160)


def test_samples_of_one_prompt_say_what_was_reused(trio):
    tokens = prompt(160, seed=17)
    trio.send(BASE, tokens)
    before = num_counted(trio.servers[RECEIVER])
    params = {"n": 3, "temperature": 0.7}
    replies = trio.servers[RECEIVER].generate(tokens, max_new_tokens=4, sampling_params=params)
    assert [told_of(Answer(it)) for it in replies] == [("reused", whole_pages(160), False)] * 3
    assert num_counted(trio.servers[RECEIVER]) - before == 3


def test_samples_without_a_token_are_like_sglangs_own_prefill_of_their_prompt(trio):
    """No label can tell such samples from SGLang's own prefill, which no request asked for. So they
    have no label."""
    before = num_counted(trio.servers[RECEIVER])
    replies = trio.servers[RECEIVER].generate(
        prompt(160, seed=19), max_new_tokens=0, sampling_params={"n": 2, "temperature": 0.7}
    )
    assert [it["output_ids"] for it in replies] == [[], []]
    assert not any("droidspeak" in it["meta_info"] for it in replies)
    assert num_counted(trio.servers[RECEIVER]) == before


def test_log_probabilities_of_a_prompt_are_the_reason(trio):
    tokens = prompt(160, seed=18)
    trio.send(BASE, tokens)
    reply = trio.ask(RECEIVER, tokens, logprob_start_len=0)
    assert told_of(reply) == ("logprobs", 0, True)
    assert len(reply.meta["input_token_logprobs"]) == 160


@ONE_FAMILY
def test_health_probes_are_not_counted(trio):
    before = num_counted(trio.servers[RECEIVER])
    for _ in range(2):
        requests.get(f"{trio.servers[RECEIVER].url}/health_generate", timeout=20).raise_for_status()
    assert num_counted(trio.servers[RECEIVER]) == before


def num_counted(server: Server) -> float:
    """Return the number of requests over all outcomes."""
    samples = scraped(f"{server.url}/metrics").items()
    return sum(value for (name, *_), value in samples if name == "droidspeak:requests_total")


@dataclass
class Load:
    """A random mixture of all kinds of requests about a few documents, many at a time."""

    trio: Team
    documents: Sequence[list[int]]
    num_sent: int = 0
    read: list[tuple[int, Answer]] = field(default_factory=list)
    """Document and answer of each request that returned log-probabilities of its tokens."""

    def send(self, random: Random, number: int) -> None:
        document = random.randrange(len(self.documents))
        kinds = [self.auto, self.auto, self.off, self.streamed, self.samples, self.grammar]
        kinds += [self.logprobs, self.mistaken, self.refused, self.aborted]
        kind = random.choice(kinds)
        kind(document, f"load-{number}")

    def ask(self, document: int, rid: str, **options) -> Answer:
        self.num_sent += 1
        return self.trio.ask(RECEIVER, self.documents[document], rid=rid, **options)

    def auto(self, document: int, rid: str) -> None:
        self.read.append((document, self.ask(document, rid)))

    def off(self, document: int, rid: str) -> None:
        reply = self.ask(document, rid, droidspeak=OFF)
        self.read.append((document, reply))

    def streamed(self, document: int, rid: str) -> None:
        self.num_sent += 1
        pieces = self.trio.servers[RECEIVER].replies(
            self.documents[document], max_new_tokens=12, return_logprob=True, rid=rid
        )
        metas = [piece["meta_info"] for piece in pieces]
        assert any("droidspeak" in meta for meta in metas)

    def samples(self, document: int, rid: str) -> None:
        self.num_sent += 2
        replies = self.trio.servers[RECEIVER].generate(
            self.documents[document], max_new_tokens=3, sampling_params={"n": 2}
        )
        assert all(Answer(reply).provenance for reply in replies)

    def grammar(self, document: int, rid: str) -> None:
        self.num_sent += 1
        reply = self.trio.servers[RECEIVER].generate(
            self.documents[document], max_new_tokens=3, sampling_params={"regex": f"(.|\\n)*|{rid}"}
        )
        assert Answer(reply).provenance

    def logprobs(self, document: int, rid: str) -> None:
        self.read.append((document, self.ask(document, rid, logprob_start_len=0)))

    def mistaken(self, document: int, rid: str) -> None:
        reply = self.ask(document, rid, droidspeak={"blok": "1:2"})
        assert reply.provenance["outcome"] == "bad_controls"

    def refused(self, document: int, rid: str) -> None:
        with pytest.raises(requests.HTTPError):
            self.ask(document, rid, logprob_start_len=100_000)

    def aborted(self, document: int, rid: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.ask, document, rid, max_new_tokens=40)
            time.sleep(0.05)
            requests.post(
                f"{self.trio.servers[RECEIVER].url}/abort_request", json={"rid": rid}, timeout=10
            )
            reply.result()


SEED = int(os.environ.get("DROIDSPEAK_TEST_SEED", "0")) or Random().randrange(1, 1 << 30)


@ONE_FAMILY
def test_every_request_is_counted_once_and_says_what_it_read(trio):
    print(f"DROIDSPEAK_TEST_SEED={SEED}")
    random = Random(SEED)
    documents = [prompt(random.randrange(70, 220), SEED + number) for number in range(6)]
    for tokens in documents[:4]:
        trio.send(BASE, tokens)
    trio.servers[RECEIVER].flush()
    load, before = Load(trio, documents), num_counted(trio.servers[RECEIVER])
    load.auto(0, "load-reused")  # one of either kind, however the others fall
    load.off(0, "load-own")
    seeds = [Random(random.randrange(1 << 30)) for _ in range(60)]
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(load.send, seeds, range(len(seeds))))
    assert num_counted(trio.servers[RECEIVER]) - before == load.num_sent
    trio.servers[RECEIVER].flush()
    own = [trio.ask(RECEIVER, tokens, droidspeak=OFF) for tokens in documents]
    for document, reply in load.read:
        is_own = reply.logprobs == pytest.approx(own[document].logprobs, abs=2e-4)
        assert reply.provenance["exact"] == is_own, reply.provenance
    assert {reply.provenance["exact"] for _, reply in load.read} == {False, True}
