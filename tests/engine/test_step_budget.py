"""Partial prefills in SGLang's own accounting of one step. Its prefill adder runs without a
server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from standins import (
    NUM_PAGES,
    PAGE,
    PLAN,
    STEP_BYTES,
    WANTED,
    Asked,
    FakeMeter,
    keys_of,
    look,
    planner_of,
    request,
    waiting_with,
)

from cachetree.errors import FetchError
from cachetree.ids import Span
from cachetree.planning import Costs, Link, PrefillCost
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.waiting import WaitingRequests

STEP_TOKENS = 96


class Slots:
    """An allocator with slots for everything, and its budget."""

    page_size = PAGE
    total_offset = 0
    remaining_total = 1 << 20

    def create_prefill_budget(self, *_args: Any, **_options: Any) -> Slots:
        return self

    def has_capacity(self) -> bool:
        return True

    def check_prefill(self, *, chunk_limit: int, **_asked: Any) -> tuple[bool, int]:
        return True, chunk_limit

    def reserve(self, *_args: Any, **_options: Any) -> None: ...


class Adder(PrefillAdder):
    """SGLang's adder with the hook. For each loaded token, half of the layers are recomputed."""

    def __init__(self, *, is_decoding: bool, align: int | None = None) -> None:
        tree = SimpleNamespace(supports_mamba=lambda: False, supports_prefix_sharing=lambda: True)
        running = SimpleNamespace(reqs=[], is_empty=lambda: not is_decoding)
        super().__init__(PAGE, tree, Slots(), running, 1.0, 1 << 20, STEP_TOKENS)
        self.waiting = MagicMock(step_tokens=lambda _rid, num_tokens: num_tokens // 2)
        self.waiting.look.return_value = set()
        self._align, self._queue = align, Queue(self.waiting, *(MagicMock() for _ in range(3)))
        scheduler = MagicMock(page_size=PAGE, truncation_align_size=align, waiting_queue=[])
        self._queue.new_prefill(lambda *_, **__: (None, running), scheduler, running_batch=running)

    def _replay_len(self, req: Any, prefix_len: int) -> int:
        return self._queue.charge(0, self, req, prefix_len)

    def add(self, num_loaded: int, num_new: int, rid: str = "r1") -> bool:
        """Return whether one more request goes into this step."""
        req = SimpleNamespace(
            rid=rid,
            prefix_len=0,
            full_untruncated_fill_ids=range(num_loaded + num_new),
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=4),
            auxiliary_swa_host_hit_length=0,
        )
        result = self._select_prefill_admission(
            req,
            total_tokens=0,
            host_hit_length=num_loaded,
            swa_host_hit_length=0,
            truncation_align_size=self._align,
        )
        if isinstance(result, AddReqResult):
            return False
        self.can_run_list.append(req)
        self._update_prefill_budget(
            result.prefix_len, result.extend_len, 4, False, replay_len=result.replay_len
        )
        return True


@pytest.mark.parametrize("is_decoding", [True, False])
def test_a_step_takes_partial_prefills_up_to_its_tokens(is_decoding):
    """Each partial prefill costs 32 tokens and a page: two of them are 96 tokens."""
    adder = Adder(is_decoding=is_decoding)
    assert [adder.add(64, 10) for _ in range(4)] == [True, True, False, False]
    assert adder.rem_chunk_tokens == 0


@pytest.mark.parametrize("is_decoding", [True, False])
def test_one_that_is_larger_than_a_step_has_it_for_itself(is_decoding):
    adder = Adder(is_decoding=is_decoding)
    assert [adder.add(num_loaded, 10) for num_loaded in (640, 640, 0)] == [True, False, False]


def test_one_is_not_refused_where_chunks_are_of_many_pages():
    """SGLang passes over a refused request, and over all requests behind it, as long as any request
    decodes."""
    adder = Adder(is_decoding=True, align=4 * PAGE)
    assert [adder.add(640, 5 * PAGE) for _ in range(2)] == [True, False]


def test_one_that_fits_takes_its_recompute_where_chunks_are_of_many_pages():
    adder = Adder(is_decoding=True, align=4 * PAGE)
    assert [adder.add(num_loaded, 10) for num_loaded in (640, 0)] == [True, False]


@pytest.mark.parametrize(("share", "num"), [(0.0, 6), (0.025, 3)])
def test_what_is_only_loaded_takes_the_time_of_its_copies(share, num):
    """The copies of 640 tokens take as long as a prefill of 16 tokens."""
    adder = Adder(is_decoding=True)
    adder.waiting.step_tokens = lambda _rid, num_tokens: int(share * num_tokens)
    assert [adder.add(640, 10) for _ in range(num + 1)] == [True] * num + [False]


# Loads whose bytes have not all come: a fetch that fails now is prefilled in full in this step.


def due(step_tokens: int, *rids: str) -> tuple[WaitingRequests, Asked, list[Any]]:
    """Return requests with E here; their KV is predicted within their recompute of half of the
    layers.

    The fetch seems to run since the machine was started, so the recompute takes years.
    """
    cache, reqs = Asked(), [request(it) for it in rids]
    meter = FakeMeter(recompute=PrefillCost(token_s=1e9, context_s=0.0), step_tokens=step_tokens)
    waiting, _ = waiting_with(cache, meter=meter, planner=planner_of(**WANTED))
    assert look(waiting, *reqs, is_decoding=True) == set(rids)
    for staging in cache.stagings:
        staging.land(PLAN.steps[0], STEP_BYTES)
    return waiting, cache, reqs


@pytest.mark.parametrize("is_decoding", [True, False])
def test_a_step_takes_no_more_unfinished_loads_than_it_could_prefill(is_decoding):
    waiting, cache, reqs = due(STEP_TOKENS, "r1", "r2")
    assert not look(waiting, *reqs, is_decoding=is_decoding)
    adder = Adder(is_decoding=is_decoding)
    adder.waiting.step_tokens = waiting.step_tokens
    num_loaded = NUM_PAGES * PAGE
    assert [adder.add(num_loaded, 10, it.rid) for it in reqs] == [True, False]
    cache.land(1)
    assert not look(waiting, *reqs, is_decoding=is_decoding)
    assert waiting.step_tokens("r1", num_loaded) == num_loaded
    assert waiting.step_tokens("r2", num_loaded) == num_loaded // 2, "all of it has come"


def test_an_unfinished_load_that_no_step_could_prefill_waits_beside_who_decodes():
    """The load has 64 tokens. A step takes up to 79 tokens and a page of the request's own, which
    is enough for the whole load."""
    waiting, cache, (req,) = due(NUM_PAGES * PAGE + PAGE - 1, "r1")
    assert look(waiting, req, is_decoding=True) == {"r1"}
    assert not look(waiting, req, is_decoding=False), "there is nobody who would wait"
    assert look(waiting, req, is_decoding=True) == {"r1"}
    cache.land()
    assert not look(waiting, req, is_decoding=True)
    assert waiting.num_restorable("r1", keys_of(req)[0]) == NUM_PAGES


def test_what_has_not_all_come_fails_before_it_is_admitted_and_holds_up_nobody():
    waiting, cache, (req,) = due(PAGE, "r1")
    assert look(waiting, req, is_decoding=True) == {"r1"}
    cache.stagings[0].fail(FetchError("a test"))
    assert not look(waiting, req, is_decoding=True)
    assert not waiting.has_source("r1")


@dataclass
class OneStep:
    """The tokens of one step, as SGLang counts them."""

    rem_chunk_tokens: int | None
    can_run_list: list[Any]
    is_decoding: bool

    @property
    def running_batch(self) -> Any:
        return SimpleNamespace(is_empty=lambda: not self.is_decoding)

    def ceil_paged_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // PAGE) * PAGE


@pytest.mark.parametrize(
    ("room", "others", "is_decoding", "charge"),
    [
        (96, [], True, 64),  # All of it,
        (96, ["another"], True, 64),
        (64, ["another"], True, 64),  # also where it does not fit any more;
        (64, [], True, 48),  # but the first of a step always does,
        (64, [], False, 32),  # and in one step, if that holds up nobody.
        (16, [], False, 0),
        (None, [], True, 64),
    ],
)
def test_recomputed_layers_take_their_share_of_a_step(room, others, is_decoding, charge):
    """The recomputed layers of a request with 20 tokens of its own count as 64 tokens, in addition
    to the tokens that SGLang replays."""
    waiting: Any = SimpleNamespace(step_tokens=lambda _rid, num_tokens: num_tokens // 2)
    queue = Queue(waiting, waiting, waiting, waiting)
    queue._least_chunk = PAGE
    req: Any = SimpleNamespace(rid="r1", prefix_len=32, full_untruncated_fill_ids=range(180))
    adder: Any = OneStep(room, others, is_decoding)
    assert queue.charge(5, adder, req, 160) == 5 + charge


@pytest.mark.parametrize(("max_stall_s", "share"), [(None, 0.5), (0.048, 1.0), (0.192, 0.25)])
@pytest.mark.parametrize("copy_s", [0.0, 0.012])
def test_a_steps_tokens_are_filled_by_layers_and_copies(max_stall_s, share, copy_s):
    """Block [1, 4) computes two of the four layers in full. A step of 96 tokens takes 96 ms; the
    copies of as many tokens take an eighth of that, or nothing."""
    settings = SimpleNamespace(max_stall_s=max_stall_s)
    planner: Any = SimpleNamespace(
        _server=SimpleNamespace(settings=settings, page_size=PAGE),
        _meter=SimpleNamespace(step_tokens=96),
    )
    plan, layer = replace(PLAN, block=Span(1, 4)), PrefillCost(token_s=1e-3 / 4, context_s=0.0)
    costs = Costs(
        kv_page_bytes=6,
        e_page_bytes=10,
        prefill=PrefillCost(token_s=1e-3, context_s=0.0),
        recompute=layer,
        links={PLAN.location: Link(byte_s=0.0, copy_byte_s=copy_s / 96)},
    )
    share += copy_s / (max_stall_s or 0.096)
    assert Planner._step_share(planner, plan, costs) == pytest.approx(share)
    loads = replace(plan, block=Span(0, 0))
    of_copies = copy_s * 24 / 16 / (max_stall_s or 0.096)
    assert Planner._step_share(planner, loads, costs) == pytest.approx(of_copies)
    unmeasured = replace(costs, prefill=None, recompute=None, links={})
    assert Planner._step_share(planner, plan, unmeasured) == (0.0 if max_stall_s else 0.5)
