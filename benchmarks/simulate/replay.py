"""One trace, one policy: what was found, and what that saved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from cachetree.checkpoint import Family
from cachetree.ids import LOCAL, ModelId, Span
from cachetree.memory import Blocks, Loan
from cachetree.planning import PrefillCost
from cachetree.tree import CacheTree, Change, Retention

from .trace import PageNames, Trace


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trace under one policy."""

    policy: str
    num_requests: int
    num_hits: int
    """Requests that found a first page."""
    num_tokens: int
    num_hit_tokens: int
    prefill_s: float
    """Of all prompts without any cache, by the cost model."""
    saved_s: float
    num_evictions: int
    """Entries: runs of pages of one model."""
    num_evicted_bytes: int
    num_refused: int
    """Prompts for which there was no room, as they are larger than the budget."""
    wall_s: float
    """What the replay took here, most of it in the tree."""

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_tokens


FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    num_kv_heads=1,
    head_dim=8,
    rope="{}",
    tokenizer="t",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
"""Its sizes only scale the budget; nothing is allocated."""


class Unbacked:
    """Lends nothing, so that a tree counts bytes that are not there."""

    file: Final = None

    def take(self, parts: Sequence[Blocks]) -> Loan:
        return Loan()

    def give_back(self, loan: Loan, places: Sequence[Span]) -> None:
        """Nothing was lent."""

    def close(self) -> None:
        """Nothing is kept here."""

    def place_of(self, view: memoryview) -> int | None:
        return None


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replay(
    trace: Trace, names: PageNames, retention: Retention, host_bytes: int, cost: PrefillCost
) -> Outcome:
    """Every request matches its prompt, prefills what its own model lacks, and stores that.

    The tree is a real one that counts real bytes and is given no memory. Requests come one after
    the other, and a prompt is stored at once; what is decoded is not.
    """
    family = trace.header.family
    clock = _Clock()
    tree = CacheTree(
        family,
        host_bytes=host_bytes,
        memory=Unbacked(),
        clock=clock,
        retention=retention,
    )
    num_evictions = num_evicted_pages = 0

    def note(change: Change) -> None:
        nonlocal num_evictions, num_evicted_pages
        num_evictions += not change.added
        num_evicted_pages += 0 if change.added else len(change.pages)

    tree.subscribe(note)
    num_hits = num_hit_tokens = num_tokens = num_refused = 0
    prefill_s = saved_s = wall_s = 0.0
    for request in trace.requests:
        clock.now_s = request.at_s
        model = ModelId(request.model)
        pages = names.of(request.prompt)
        begun_at_s = time.perf_counter()
        found = [
            match.num_pages
            for match in tree.match(pages)
            if (match.model, match.location) == (model, LOCAL)
        ]
        reservation = tree.reserve(model, None, pages, ())
        if reservation is None:
            num_refused += 1
        else:
            reservation.commit()
        wall_s += time.perf_counter() - begun_at_s
        hit_tokens = sum(found) * family.page_size
        num_hits += bool(found)
        num_hit_tokens += hit_tokens
        num_tokens += request.num_tokens
        prefill_s += cost.seconds(0, request.num_tokens)
        saved_s += cost.seconds(0, hit_tokens)
    return Outcome(
        policy=retention.eviction,
        num_requests=len(trace.requests),
        num_hits=num_hits,
        num_tokens=num_tokens,
        num_hit_tokens=num_hit_tokens,
        prefill_s=prefill_s,
        saved_s=saved_s,
        num_evictions=num_evictions,
        num_evicted_bytes=num_evicted_pages * family.num_layers * family.kv_page_bytes,
        num_refused=num_refused,
        wall_s=wall_s,
    )
