"""Requests that wait for a fetch: held until its deadline, once, and told how long."""

from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachetree.budget import Budget, BudgetedStaging
from cachetree.clock import Deadline
from cachetree.ids import Location, ModelId, Span
from cachetree.plan import Plan
from cachetree.staging import pageable
from sglang_droidspeak import prefixes
from sglang_droidspeak.labels import Labels
from sglang_droidspeak.leaders import Leaders
from sglang_droidspeak.meta_info import RequestProvenance
from sglang_droidspeak.models import Part
from sglang_droidspeak.planner import Declined, Planned
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.waiting import WaitingRequests

PAGE = 16
DEADLINE_S = 0.2
PLAN = Plan(
    sender=ModelId("s"),
    receiver=ModelId("r"),
    location=Location("tcp://127.0.0.1:1"),
    pages=Span(0, 4),
    block=Span(1, 3),
    num_layers=4,
)


class SilentCache:
    """Its worker takes every request, and sends nothing."""

    def __init__(self) -> None:
        self.budget = Budget(1 << 20)
        self.deadlines: list[Deadline] = []

    def fetch(self, plan: Plan, _pages: Any, deadline: Deadline) -> BudgetedStaging:
        self.deadlines.append(deadline)
        sizes = dict.fromkeys(plan.steps, 40)
        assert self.budget.take(sum(sizes.values()))
        return BudgetedStaging(sizes, deadline, pageable, self.budget, lambda _staging: None)


class Request(SimpleNamespace):
    """Unlike its base it can be referred to weakly."""


def request(rid: str = "r1", lora_id: str | None = None) -> Any:
    return Request(
        rid=rid,
        lora_id=lora_id,
        kv=SimpleNamespace(holds_kv=False),
        output_ids=[],
        customized_info=None,
        multimodal_inputs=None,
        input_embeds=None,
        positional_embed_overrides=None,
        session=None,
        extra_key=lora_id,
        cache_salt=None,
        sampling_params=SimpleNamespace(n=1, max_new_tokens=8),
        is_retracted=False,
        finished_reason=None,
        to_finish=None,
        full_untruncated_fill_ids=list(range(4 * PAGE + 1)),
        refresh_fill_ids=lambda: None,
        _compute_max_prefix_len=lambda length: length - 1,
    )


def waiting_on(
    cache: SilentCache,
    notes: list[RequestProvenance],
    *,
    is_experiment: bool = True,
    **others: Any,
) -> WaitingRequests:
    settings = SimpleNamespace(
        hicache_backend=None, fetch_deadline_s=DEADLINE_S, max_stall_s=None, gate="off"
    )
    planned = Planned(plan=PLAN, is_optional=False, is_experiment=is_experiment, pool_pages=None)
    parts: Any = {
        "site": SimpleNamespace(settings=settings, page_size=PAGE),
        "cache": cache,
        "meter": SimpleNamespace(s_per_token_layer=None),
        "labels": SimpleNamespace(note=lambda _req, told: notes.append(told)),
        "planner": SimpleNamespace(plan=lambda *_: planned),
        "pool": SimpleNamespace(has_approximate=False),
        "activated": SimpleNamespace(meet=lambda _req: None),
        "leaders": SimpleNamespace(
            follow=lambda *_: None, prune=lambda _waiting: None, clear=lambda: None
        ),
        "ranks": Ranks(None),
    }
    return WaitingRequests(**parts | others)


class Team:
    """Two models that may read each other, and have nothing yet; stands for what leaders ask."""

    plan = staticmethod(lambda *_: Declined("no_match"))
    would_reuse = staticmethod(lambda *_: True)
    reach = staticmethod(lambda *_: 0)

    def part_of(self, req: Any) -> Part:
        return Part(ModelId(f"model {req.lora_id}"), req.lora_id, None)

    def __len__(self) -> int:
        return 2


def test_a_request_is_held_until_one_deadline_after_its_first_sight() -> None:
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(), request()
    waiting = waiting_on(cache, notes)
    tree: Any = None
    before_s = time.monotonic()
    assert waiting.look([req], tree, is_decoding=False) == {req.rid}
    (deadline,) = cache.deadlines
    assert before_s < deadline.at_s - DEADLINE_S < time.monotonic()
    while waiting.look([req], tree, is_decoding=False):
        assert not notes
    assert deadline.has_passed
    held_ms = 1000 * (time.monotonic() - before_s)
    (told,) = notes
    assert told.outcome == "fallback: DeadlineExceeded"
    assert 1000 * DEADLINE_S <= told.queued_ms <= held_ms

    # It stays in the queue where there are no slots for it.
    assert not waiting.look([req], tree, is_decoding=False)
    assert len(cache.deadlines) == 1
    assert len(notes) == 1
    assert cache.budget.num_bytes == 0


def test_a_leader_that_is_aborted_in_the_queue_holds_nobody_up_and_is_forgotten() -> None:
    team: Any = Team()
    leaders = Leaders(team, team, team, PAGE)
    waiting = waiting_on(SilentCache(), [], planner=team, leaders=leaders)
    leader, follower, tree = request("leads"), request("follows", "x"), None
    gone = weakref.ref(leader)
    for _ in range(2):
        assert waiting.look([leader, follower], tree, is_decoding=False) == {"follows"}
    del leader
    assert not waiting.look([follower], tree, is_decoding=False)
    assert not waiting.look([], tree, is_decoding=False)
    gc.collect()
    assert gone() is None


def test_a_leader_that_left_nothing_holds_nobody_up_after_its_first_token() -> None:
    team: Any = Team()
    waiting = waiting_on(SilentCache(), [], planner=team, leaders=Leaders(team, team, team, PAGE))
    leader, follower, tree = request("leads"), request("follows", "x"), None
    assert waiting.look([leader, follower], tree, is_decoding=False) == {"follows"}
    leader.kv.holds_kv = True
    assert waiting.look([follower], tree, is_decoding=False) == {"follows"}, "it computes"
    leader.output_ids.append(7)
    assert not waiting.look([follower], tree, is_decoding=False)


def test_a_request_reads_approximate_kv_only_by_its_plan() -> None:
    """And goes back where the plan is given up, or is an experiment."""
    for is_experiment in (True, False):
        cache, req = SilentCache(), request()
        waiting = waiting_on(cache, [], is_experiment=is_experiment)
        tree: Any = None
        while waiting.look([req], tree, is_decoding=False):
            assert prefixes.is_approximate(req) != is_experiment
            assert (req.extra_key is None) == is_experiment
        assert not prefixes.is_approximate(req)
        assert req.extra_key is None


@pytest.mark.parametrize("is_approximate", [False, True])
def test_what_was_told_to_be_exact_stays_so(is_approximate: bool) -> None:
    """A request that was retracted after its first tokens were sent is planned again."""
    cache, req, metrics = SilentCache(), request(), SimpleNamespace(count_outcome=lambda _: None)
    labels = Labels(metrics)  # type: ignore[arg-type]
    labels.read([req], torch.tensor([is_approximate]))
    labels.report(None, [req], False)
    waiting = waiting_on(cache, [], is_experiment=False)
    held = waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
    assert bool(held) == prefixes.is_approximate(req) == is_approximate
    waiting.clear()


@pytest.mark.parametrize(
    ("num_on_device", "has_memory", "outcome"),
    [(4, True, "too_short"), (3, True, "no_slots"), (0, False, "staging_full")],
)
def test_a_plan_that_was_not_carried_out_says_why(
    num_on_device: int, has_memory: bool, outcome: str
) -> None:
    """Known when SGLang has admitted the request: a twin may have left its pages there."""
    notes: list[RequestProvenance] = []
    cache, req = SilentCache(), request()
    if not has_memory:
        cache.fetch = lambda *_: None  # type: ignore[method-assign]
    waiting = waiting_on(cache, notes)
    waiting.look([req], None, is_decoding=False)  # type: ignore[arg-type]
    assert not notes
    req.prefix_len = num_on_device * PAGE
    waiting.admitted([req])
    assert [told.outcome for told in notes] == [outcome]
    assert cache.budget.num_bytes == 0
    waiting.admitted([req])
    assert len(notes) == 1
