"""S13 and short documents: one worker whose link is paced, and receivers that read from it.

What the sender stored is copied into this process, which serves it under the worker's address at
any rate; the worker itself ends. A receiver's own cache is emptied before every request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.relay import (
    NUM_LEARNING,
    NUM_NEW,
    Bench,
    Sample,
    asked,
    counts,
    median,
    mirror,
    paced,
    paired_ratio,
    ttft,
)
from benchmarks.schedule import PAPER, ttfts
from cachetree import Span
from cachetree.planning import Strategy
from profiles.random_models import random_prompt

from .client import Answer, Ask, run
from .measures import percentiles
from .rig import Rig, until_stored
from .studies import Found, Say

STRATEGIES = (Strategy.EVERYTHING_FIRST, Strategy.REUSED_FIRST, Strategy.PIPELINED)
FAST = 1e12
"""Bytes/s, as good as no pace."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Of a document, from its beginning."""
GAP = 2
"""Loads of a layer after which the second receiver is asked, as in the paper."""
FIRST_SEED = 50_000


@contextmanager
def relayed(it: Rig) -> Iterator[Bench]:
    """Documents of their own, served from here from now on."""
    numbers = range(FIRST_SEED, FIRST_SEED + it.size.num_asked)
    documents = [random_prompt(it.size.document_tokens, seed) for seed in numbers]
    it.read(documents)
    with it.reader() as relay:
        until_stored(relay, documents)
        bench = Bench(it.sender, it.reusing[0], relay, it.worker.address, documents)
        mirror(bench, Span(*it.size.block))
        it.worker.stop()
        yield bench


def two_receivers(it: Rig, bench: Bench, say: Say) -> Found:
    """S13: two receivers over one link, the second asked a little after the first.

    The first recomputes from where the block begins to the last layer, the second the layers
    before. Loading a layer takes as long as recomputing one. The paper has both on one device, one
    after the other; here each has a device of its own, and their fetches share the link evenly,
    which is what the times are predicted from.
    """
    start, layers = it.size.block[0], it.size.layers
    blocks = (Span(start, layers), Span(0, start))
    with paced(bench, FAST, _named(blocks[0])):
        unpaced = _alone(it, bench, blocks[:1])
    layer_ms = median(unpaced[0], "recompute_ms") / len(blocks[0])
    layer_bytes = 2 * it.size.hidden * 4 * it.size.document_tokens
    found: dict[Strategy, list[list[Answer]]] = {strategy: [] for strategy in STRATEGIES}
    say(f"two receivers over {layer_bytes / layer_ms / 1e3:.0f} MB/s")
    with paced(bench, layer_bytes / layer_ms * 1000, _named(blocks[0])):
        parts = _alone(it, bench, blocks)
        for document in range(len(bench.documents)):
            for strategy in STRATEGIES:
                it.flush()
                controls = [_named(of) | {"strategy": strategy.value} for of in blocks]
                answers = run(_each(it, bench, document, controls, GAP * layer_ms / 1000))
                assert {answer.outcome for answer in answers} == {"reused"}, answers
                found[strategy].append(answers)
    for same in zip(*found.values(), strict=True):
        said = [[of.output_ids for of in both] for both in same]
        assert said.count(said[0]) == len(said), "strategies must agree"
    rows = [
        {
            "strategy": strategy.value,
            "in_the_paper": sum(ttfts(PAPER, strategy)),
            "predicted_ms": sum(_predicted(strategy, blocks, layers, parts, GAP * layer_ms)),
            **percentiles("total_ttft_ms", [sum(of.ttft_s for of in both) for both in answered]),
        }
        for strategy, answered in found.items()
    ]
    requests = [
        {"strategy": strategy.value, **msgspec.to_builtins(of)}
        for strategy, answered in found.items()
        for both in answered
        for of in both
    ]
    return Found({"layer_ms": layer_ms, "rows": rows}, requests)


def _alone(it: Rig, bench: Bench, blocks: Sequence[Span]) -> list[list[Sample]]:
    """What each receiver takes while the other is not asked, the reused layers loaded first."""
    first = {"strategy": Strategy.REUSED_FIRST.value}
    receivers = [replace(bench, receiver=it.replica(of, {})) for of in range(len(blocks))]
    return [
        [receiver.ask(of, _named(block) | first) for of in range(len(bench.documents))]
        for receiver, block in zip(receivers, blocks, strict=True)
    ]


def _each(
    it: Rig, bench: Bench, document: int, controls: Sequence[Mapping[str, str]], gap_s: float
) -> list[Ask]:
    """One question to each receiver, a gap after the one before."""
    return [
        Ask(
            at_s=of * gap_s,
            url=it.replica(of, {}).url,
            document=document,
            tokens=[*bench.documents[document], *random_prompt(NUM_NEW, seed=of)],
            num_new=1,
            controls=given,
        )
        for of, given in enumerate(controls)
    ]


def _predicted(
    strategy: Strategy,
    blocks: Sequence[Span],
    layers: int,
    parts: Sequence[Sequence[Sample]],
    gap_ms: float,
) -> list[float]:
    """TTFTs, from what each receiver took alone with the reused layers loaded first."""
    fetch_ms = []
    for block, of in zip(blocks, parts, strict=True):
        rows = _rows(block, layers, Strategy.REUSED_FIRST)
        row_ms = median(of, "fetch_ms") / rows
        fetch_ms.append(row_ms * _rows(block, layers, strategy))
    landed = fair_link(*fetch_ms, gap_ms)
    found = []
    for which, (block, of) in enumerate(zip(blocks, parts, strict=True)):
        recompute_ms = median(of, "recompute_ms")
        rest_ms = median(of, ttft) - median(of, "fetch_ms") - recompute_ms
        e_ms = fetch_ms[which] / _rows(block, layers, strategy) if block.start else 0.0
        landed_ms = landed[which] - which * gap_ms
        is_pipelined = strategy is Strategy.PIPELINED
        done_ms = max(landed_ms, e_ms + recompute_ms) if is_pipelined else landed_ms + recompute_ms
        found.append(done_ms + rest_ms)
    return found


def _rows(block: Span, layers: int, strategy: Strategy) -> int:
    """Vectors of the hidden size that a fetch brings for a token: K and V of a layer, and E."""
    is_everything = strategy is Strategy.EVERYTHING_FIRST
    return 2 * (layers if is_everything else layers - len(block)) + bool(block.start)


def fair_link(first: float, second: float, gap: float) -> tuple[float, float]:
    """When each is there, of two that share a link evenly; both take so long alone, and the second
    begins a gap after the first."""
    if first <= gap:
        return first, gap + second
    left = first - gap
    both = 2 * min(left, second)
    last = gap + left + second
    return (gap + both, last) if left <= second else (last, gap + both)


def short_documents(it: Rig, bench: Bench, say: Say) -> Found:
    """Where reuse does not pay: the beginnings of documents, over a link that costs nothing."""
    block = _named(Span(*it.size.block))
    arms = {"full prefill": {"mode": "off"}, "block": block, "planner": {"mode": "auto"}}
    rows, requests = [], []
    with paced(bench, FAST, block):
        for share in SHARES:
            num_tokens = int(share * it.size.document_tokens)
            say(f"documents of {num_tokens} tokens")
            short = replace(bench, documents=[of[:num_tokens] for of in bench.documents])
            found = asked(short, arms, NUM_LEARNING)
            rows.append({"tokens": num_tokens, "arms": _summary(found)})
            requests += [
                {"tokens": num_tokens, "arm": name, "ttft_ms": it.ttft_ms, "outcome": it.outcome}
                for name, of in found.items()
                for it in of
            ]
    return Found({"rows": rows}, requests)


LINKS = {"s13": two_receivers, "short": short_documents}


def _summary(found: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Of each arm its TTFT, and how many times that of a full prefill of the same document."""
    return {
        name: {
            **percentiles("ttft_ms", [sample.ttft_ms / 1000 for sample in of]),
            "ratio": paired_ratio(found, name, "full prefill"),
            "outcomes": counts(of),
        }
        for name, of in found.items()
    }


def _named(block: Span) -> dict[str, str]:
    return {"block": f"{block.start}:{block.stop}"}
