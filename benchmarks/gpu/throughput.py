"""Requests per second at a target for the first token, with two models on one device.

A receiver gets requests for documents that a sender has read, at random times (Poisson). The
receiver's KV pool has room for less than half of the documents, so none is left there when the next
request for it comes. Two ways are compared: to compute all layers, or only a block. The rate rises
from run to run, until fewer than nine of ten first tokens come within the target, or a minute is
over. The target is twice the TTFT of a full prefill on an idle server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.gpu.servers import PAGE, Scale, control_of, reused, running_pair, scale
from benchmarks.serving_study.arrivals import at_rate, poisson, shuffled_rounds
from benchmarks.serving_study.client import Answer, Ask, run
from profiles.random_models import random_prompt

TARGET = 2.0
IN_TIME = 0.9
FIRST_LOAD, STEP = 0.6, 1.25
"""First rate, and the factor from each rate to the next. The first rate is a share of the rate at
which requests can be answered one after the other."""
MOST_S = 60.0
NEW_TOKENS = 8
SEED = 7
Send = Callable[[Sequence[Ask]], list[Answer]]


def measure(_num_tokens: int) -> Iterator[dict[str, Any]]:
    at = scale()
    document_tokens = at.document_tokens + PAGE
    pool_tokens = max(int(0.4 * at.num_documents), 3) * document_tokens // PAGE * PAGE
    documents = [random_prompt(at.document_tokens, seed=it) for it in range(at.num_documents)]
    with running_pair(at, **{"max-total-tokens": pool_tokens}) as (sender, receiver):
        for tokens in documents:
            sender.generate(tokens, max_new_tokens=1)
        for tokens in documents:  # Returns once the sender offers the document.
            reused(receiver, tokens, at.block)
        yield from measured(Requests(receiver.url, documents, receiver.flush, at))


class Requests:
    """Sends requests to one receiver."""

    def __init__(
        self,
        url: str,
        documents: Sequence[Sequence[int]],
        flush: Callable[[], object],
        at: Scale,
        send: Send = run,
    ) -> None:
        self.at = at
        self._url, self._documents, self._flush, self._send = url, documents, flush, send

    def ask(self, times_s: Sequence[float], controls: Mapping[str, str]) -> list[Answer]:
        """Send a request at each time, about the documents in turns, from an empty cache."""
        self._flush()
        documents = shuffled_rounds(len(times_s), len(self._documents), SEED)
        return self._send(
            [
                Ask(
                    at_s=at_s,
                    url=self._url,
                    document=document,
                    tokens=self._documents[document],
                    num_new=NEW_TOKENS,
                    controls=controls,
                )
                for at_s, document in zip(times_s, documents, strict=True)
            ]
        )


def measured(requests: Requests, clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    """Raise the rate from run to run for each way, and yield the results after each run."""
    ways = {"full": {"mode": "off"}, "reused": control_of(requests.at.block)}
    idle = [requests.ask([0.0], ways["full"])[0] for _ in range(4)][1:]
    target_s = TARGET * median(it.ttft_s for it in idle)
    first_rate = FIRST_LOAD / fmean(it.latency_s for it in idle)
    results: dict[str, Any] = {"ttft_target_ms": round(1000 * target_s, 2)}
    yield results
    for way, controls in ways.items():
        rate, best, until_s = first_rate, 0.0, clock() + MOST_S
        while clock() < until_s:
            num = max(10, round(rate * requests.at.run_s))
            answers = requests.ask(at_rate(poisson(num, SEED), rate), controls)
            outcomes = {it.outcome for it in answers}
            if way == "reused" and "reused" not in outcomes:
                raise RuntimeError(f"no request reused KV: {sorted(outcomes)}")
            share = fmean(it.ttft_s <= target_s for it in answers)
            p90_ms = 1000 * float(np.percentile([it.ttft_s for it in answers], 90))
            results[f"{way}_at_{rate:.2f}_per_s"] = f"{share:.0%} in time, p90 {p90_ms:.0f} ms"
            best = rate if share >= IN_TIME else best
            # Zero: not even the first rate was in time.
            results[f"{way}_per_s"] = round(best, 3)
            yield results
            if share < IN_TIME:
                break
            rate *= STEP
    if results["full_per_s"]:
        results["gain"] = round(results["reused_per_s"] / results["full_per_s"], 3)
        yield results
