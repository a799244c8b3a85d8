"""Seconds that reuse saved or lost, compared with what a client would have measured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from standins import (
    NUM_PAGES,
    PAGE,
    PLAN,
    Asked,
    Now,
    loading,
    look,
    made,
    planner_of,
    request,
    waiting_with,
)

from cachetree.ids import Span
from cachetree.names import ModelNames
from cachetree.planning import Patience
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import ForwardMode
from sglang_droidspeak.metrics import Metrics, Saving
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import forward
from sglang_droidspeak.request.forward import BatchForward
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Request

NUM_TOKENS, NUM_NEW = NUM_PAGES * PAGE, 16
TOKEN_S = 0.01
OWN = replace(PLAN, sender=PLAN.receiver)
PAIR = PLAN.sender, PLAN.receiver


class Rig:
    """A server with a clock. On this clock, full prefill takes `TOKEN_S` for each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = Now(monkeypatch)
        monkeypatch.setattr(forward, "time", SimpleNamespace(monotonic=self.now))
        monkeypatch.setattr(forward, "PartialPrefill", lambda *_: None)
        self.metrics = Metrics(enabled=False)
        meter = SimpleNamespace(
            step_tokens=64,
            mean_prefill_s=lambda tokens, model: TOKEN_S * len(tokens),
            loaded=lambda *_: None,
            forward=lambda tokens, models: nullcontext(),
        )
        self.forward = made(
            BatchForward, meter=meter, labels=Labels(self.metrics, ModelNames()), ranks=Ranks(None)
        )
        self.forward._before = lambda *_: (0.0, 0.0)  # type: ignore[method-assign]

    def loading(self, rid: str = "r1") -> Request:
        source: Any = SimpleNamespace(
            release=lambda: None,
            staging=SimpleNamespace(
                num_landed_bytes=0, num_bytes=0, started_s=0.0, completed_s=0.0
            ),
        )
        at, slots = Span(0, NUM_TOKENS), torch.arange(NUM_TOKENS)
        return loading(PLAN, source, at, slots, request(rid))

    def run(self, *loads: Request, takes_s: float, num_others: int = 0) -> None:
        """Run one batch, from its start to its end on the device."""
        reqs = [it.req for it in loads] + [request(f"other{i}") for i in range(num_others)]
        batch = SimpleNamespace(
            reqs=reqs,
            prefix_lens=[NUM_TOKENS if i < len(loads) else 0 for i in range(len(reqs))],
            extend_lens=[NUM_NEW] * len(reqs),
            forward_mode=ForwardMode.EXTEND,
            hicache_consumer_index=0,
        )
        self.forward.expect(0, loads)
        self.forward.run_batch(lambda *_: None, None, batch)
        self.now.now_s += takes_s
        assert self.forward.done(0)

    @property
    def saved_s(self) -> tuple[float, float]:
        saving = self.metrics.savings.get(PAIR, Saving(sender=PLAN.sender, receiver=PLAN.receiver))
        for metric, value in (
            (self.metrics.saved_s, saving.saved_s),
            (self.metrics.lost_s, saving.lost_s),
        ):
            assert metric.labels(*PAIR)._value.get() == pytest.approx(value)
        return pytest.approx(saving.saved_s), pytest.approx(saving.lost_s)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


FULL_S = TOKEN_S * (NUM_TOKENS + NUM_NEW)
"""Seconds that a client waits without reuse."""


def test_one_request_saves_what_its_client_would_have_waited_for(rig):
    request = rig.loading()
    request.match_s = 0.02
    rig.now.now_s += 0.02
    request.pass_over()
    rig.now.now_s += 0.1  # Its fetch.
    rig.run(request, takes_s=0.3)
    assert rig.saved_s == (FULL_S - 0.42, 0)


def test_a_wait_in_which_no_step_could_have_taken_it_costs_nothing(rig):
    request = rig.loading()
    rig.now.now_s += 10.0
    rig.run(request, takes_s=0.3)
    assert rig.saved_s == (FULL_S - 0.3, 0)


def test_a_wait_for_another_request_that_computes_the_same_costs_nothing(rig):
    request = rig.loading()
    request.pass_over()
    rig.now.now_s += 5.0
    request.has_followed, request.match_s = True, 5.0
    rig.now.now_s += 0.1
    rig.run(request, takes_s=0.3)
    assert rig.saved_s == (FULL_S - 0.4, 0)


def test_requests_of_a_batch_share_its_time_by_their_work(rig):
    """A third request loads nothing. Of 48 new tokens each request has 16, and loaded tokens cost
    nothing."""
    rig.run(rig.loading(), rig.loading("r2"), takes_s=0.6, num_others=1)
    assert rig.saved_s == (2 * FULL_S - 0.4, 0)


def test_a_slow_reuse_is_a_loss(rig):
    rig.run(rig.loading(), takes_s=2 * FULL_S)
    rig.run(rig.loading(), takes_s=0.5 * FULL_S)
    assert rig.saved_s == (0.5 * FULL_S, FULL_S)


def test_nothing_is_counted_while_the_devices_speed_is_unknown(rig):
    rig.forward._meter.mean_prefill_s = lambda *_: None
    rig.run(rig.loading(), takes_s=0.3)
    assert rig.saved_s == (0, 0)


def test_a_request_that_waited_in_vain_has_lost_its_wait(monkeypatch):
    now = Now(monkeypatch)
    cache, req = Asked(now), request()
    planner = planner_of(is_experiment=False, patience=Patience(saving_s=1.0))
    waiting, labels = waiting_with(cache, planner=planner)
    assert look(waiting, req) == {req.rid}
    waiting.pass_over([req.rid])
    now.now_s += 1.5
    assert not look(waiting, req)
    assert labels.by_rid[req.rid].outcome.startswith("fallback")
    assert labels.savings == [pytest.approx(-1.5)]


def test_tokens_are_counted_as_exact_or_approximate(rig):
    rig.run(rig.loading(), takes_s=0.3)
    assert rig.metrics.reused_tokens.labels("approximate")._value.get() == NUM_TOKENS


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_answer_and_a_counter_say_how_many_tokens_are_approximate(is_aborted):
    metrics = Metrics(enabled=False)
    labels = Labels(metrics, ModelNames())
    for is_approximate in (True, False):
        req = request(extend_end=3, finished_reason=FINISH_ABORT() if is_aborted else None)
        prefixes.note_approximate(req, 32)
        prefixes.move(req, approximate=is_approximate)
        labels.report([req])
        (provenance,) = req.customized_info[KEY]
        assert provenance["approximate_tokens"] == 32 * is_approximate
    assert metrics.approximate_tokens._value.get() == 32 * (not is_aborted)
