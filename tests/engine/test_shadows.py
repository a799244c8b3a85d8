"""Answers that are compared with an exact run: which ones, when, and that their users see no
effect."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator
from math import log
from time import monotonic
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from cachetree.planning import PlanId
from sglang_droidspeak.engine import asking
from sglang_droidspeak.engine.asking import ANSWERED
from sglang_droidspeak.guard import shadows
from sglang_droidspeak.guard.plans import POSITIONS, GuardQuestion, GuardState, WatchedPair
from sglang_droidspeak.guard.shadows import MAX_WAITING, Budget, Shadows
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.start.config import Settings

PROMPT = [7, 3, 9, 4]
PLAN = PlanId("S", "R", (2, 5), False)  # type: ignore[arg-type]
REUSED = {
    "outcome": "reused",
    "exact": False,
    "sender": "S",
    "receiver": "R",
    "block": [2, 5],
    "e_corrected": False,
    "reused_tokens": 32,
}
THERE = {"outcome": "too_short", "exact": False}
"""Label of a greedy run that reads KV from the device."""
SERVED, EXACT = 0.9, 0.4
"""Probabilities of token 1 in the served and in the exact run. Token 2 has the rest."""


def entries(likely: float) -> list[tuple[float, int, None]]:
    return [(log(likely), 1, None), (log(1 - likely), 2, None)]


class Manager:
    """Stands for SGLang's TokenizerManager. Its answers are ten times token 1."""

    def __init__(self, label: dict[str, Any], guard: Shadows) -> None:
        self.label, self.guard = label, guard
        self.rid_to_state: dict[str, None] = {}
        self.heard: list[GuardQuestion] = []
        self.asked: list[Any] = []
        self.suspects: tuple[PlanId, ...] = ()
        self.pairs: tuple[WatchedPair, ...] = ()
        self.lora_ids = ["id"]
        """Ids that the adapter's name stands for, one for each request in turn."""
        self.loaded: dict[str, Any] = {}
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: self.loaded)
        self.lacks: tuple[str, ...] = ()
        """Parts that an answer lacks."""
        self.run_s = 0.0
        """Seconds that a run of the guard takes."""
        self.there: dict[str, Any] = THERE
        """Label of greedy runs."""
        self.num_there = 64
        """Number of tokens of a greedy run that the device has."""
        self.outcome = "off"
        """Outcome of exact runs."""
        self.fails = False
        self.is_deaf = False
        self.is_left = False
        """Whether the client has gone away and SGLang was told so."""

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        return self.guard.generate(Manager._plain, self, obj, request)

    async def _plain(self, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
        obj.normalize_batch_and_arguments()
        self.asked.append(obj)
        if obj.lora_path:
            obj.lora_id = self.lora_ids.pop(0)
            self.loaded[obj.lora_path] = SimpleNamespace(lora_id=obj.lora_id)
        await asyncio.sleep(0)
        meta: dict[str, Any] = {"id": obj.rid, "finish_reason": {"type": "length"}}
        meta["cached_tokens"] = 64
        custom = obj.sampling_params.get("custom_params") or {}
        if isinstance(custom, dict) and ANSWERED in custom:
            yield await self._run(obj, meta, custom[ANSWERED])
            return
        for start in (0, 3, 6, 9) if obj.stream else (9,):
            reply = {"output_ids": [1] * (start + 1), "text": "", "meta_info": dict(meta)}
            reply["meta_info"][KEY] = [self.label]
            if obj.return_prompt_token_ids:
                reply["prompt_token_ids"] = list(PROMPT)
            for part in self.lacks:
                reply.pop(part, reply["meta_info"].pop(part, None))
            reply["meta_info"]["finish_reason"] = meta["finish_reason"] if start == 9 else None
            try:
                yield reply
            except GeneratorExit:
                self.is_left = True
                raise

    async def _run(self, obj: Any, meta: dict[str, Any], num_answered: int) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no room")
        self.rid_to_state[obj.rid] = None
        try:
            await asyncio.sleep(self.run_s)
        finally:
            del self.rid_to_state[obj.rid]
        if num_answered:
            part, likely, num, first = "input", EXACT, num_answered, [None]
            assert obj.logprob_start_len == len(obj.input_ids) - num_answered - 1
            meta[KEY] = [{"outcome": self.outcome, "exact": True}]
        else:
            part, likely, num, first = "output", SERVED, obj.sampling_params["max_new_tokens"], []
            meta |= {KEY: [self.there], "cached_tokens": self.num_there}
        meta[f"{part}_token_logprobs"] = [*first, *[entries(likely)[0]] * num]
        meta[f"{part}_top_logprobs"] = [*first, *[entries(likely)] * num]
        return {"output_ids": [], "meta_info": meta}

    async def get_internal_state_communicator(self, asked: Any) -> list[Any]:
        page, question = asking.asked(asked)
        assert page == asking.GUARD
        if self.is_deaf:
            raise TimeoutError("no scheduler")
        self.heard.append(msgspec.json.decode(question, type=GuardQuestion))
        state = GuardState(shadow_rate=1.0, pairs=self.pairs, suspects=self.suspects)
        return [SimpleNamespace(internal_state={KEY: msgspec.to_builtins(state)})]

    def auto_create_handle_loop(self) -> None: ...


def asked(rid: str = "r1", /, **options: Any) -> GenerateReqInput:
    params = {"temperature": 0, **options.pop("params", {})}
    fixed = {"input_ids": list(PROMPT), "rid": rid, "sampling_params": params}
    return GenerateReqInput(**{**fixed, **options})


class Sleepless(selectors.DefaultSelector):
    """Time of an event loop in which only sleeps take time, exactly as long as they ask for."""

    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        loop.time = self.clock  # type: ignore[method-assign]
        return loop

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(timeout and 0.0)


def served(manager, *objs, busy_s=0.0, loop=None):
    """Return the reply to each request, when no comparison waits any more. After the last reply,
    the server is busy for `busy_s`."""

    async def ask() -> list[list[Any]]:
        manager.rid_to_state["another"] = None
        replies = []
        for obj in objs:
            replies.append([it async for it in manager.generate_request(obj)])
        await asyncio.sleep(busy_s)
        del manager.rid_to_state["another"]
        if manager.guard._task is not None:
            await manager.guard._task
        return replies

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(ask())


@pytest.fixture(autouse=True)
def _one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set one key, so that each run chooses the same requests."""
    monkeypatch.setattr(shadows, "_KEY", b"a server's")


def guard(rate=1.0, deadline_s=10.0, busy_share=0.0, clock=monotonic):
    settings = {"shadow_rate": rate, "shadow_deadline_s": deadline_s, "guard_path": "guard.json"}
    return Shadows(Settings(**settings, shadow_busy_share=busy_share), clock)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"n": 1, "regex": "a*"}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_compared_and_its_user_sees_nothing(stream, params):
    """Runs that are compared are greedy, even if the user has asked for sampling."""
    manager = Manager(REUSED, guard())
    (replies,) = served(manager, asked(stream=stream, params=params))
    alone = Manager(REUSED, guard(rate=0.0))
    assert [replies] == served(alone, asked(stream=stream, params=params)) and alone.heard == []
    (heard,) = manager.heard
    assert heard.shadow is not None and heard.shadow.plan == PLAN
    assert heard.shadow.tv == pytest.approx(SERVED - EXACT)
    user, greedy, exact = manager.asked
    assert not user.return_logprob and user.sampling_params == alone.asked[0].sampling_params
    assert list(greedy.input_ids) == PROMPT
    assert list(exact.input_ids) == [*PROMPT, *[1] * POSITIONS]
    assert [it.sampling_params["temperature"] for it in (greedy, exact)] == [0, 0]


def test_answers_about_one_document_name_it():
    manager = Manager(REUSED, guard())
    served(manager, asked("r1"), asked("r2"))
    one, two = (it.shadow for it in manager.heard)
    assert one and two and one.document == two.document and one.hour > 400_000


def test_controls_of_the_user_are_those_of_the_greedy_run():
    manager = Manager(REUSED, guard())
    custom = {KEY: {"block": "2:5"}, "other": 1}
    served(manager, asked(params={"custom_params": custom}))
    _, greedy, exact = (it.sampling_params.get("custom_params") for it in manager.asked)
    assert greedy == {KEY: {"block": "2:5"}, ANSWERED: 0}
    assert exact == {KEY: {"mode": "off"}, ANSWERED: POSITIONS}


@pytest.mark.parametrize(
    ("labels", "num_there", "is_compared"),
    [
        (THERE, 64, True),
        (THERE, 48, False),
        ({**THERE, "exact": True}, 64, False),
        (REUSED, 0, True),
        ({**REUSED, "block": [0, 5]}, 64, False),
    ],
    ids=["there", "evicted in part", "exact by now", "loaded again", "loaded by another plan"],
)
def test_a_greedy_run_reads_what_the_answer_has_read_or_tells_nothing(
    labels, num_there, is_compared
):
    manager = Manager(REUSED, guard())
    manager.there, manager.num_there = labels, num_there
    served(manager, asked())
    (heard,) = manager.heard
    assert (heard.shadow is not None) == is_compared == (not heard.missed)


def test_ids_of_the_prompt_are_shown_to_who_asks():
    (replies,) = served(Manager(REUSED, guard()), asked(return_prompt_token_ids=True))
    assert replies[-1]["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize(
    "label",
    [
        {"outcome": "no_match", "exact": True},
        {**REUSED, "exact": True},
        {**REUSED, "outcome": "own"},
        {**REUSED, "receiver": "S"},
        {**REUSED, "reused_tokens": 31},  # Most of it may be by another plan.
        {},
    ],
    ids=str,
)
def test_what_reused_nothing_approximate_has_no_shadow(label):
    manager = Manager(label, guard())
    served(manager, asked())
    assert manager.heard == [] and len(manager.asked) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"n": 2}},
        {"params": {"n": None}},
        {"params": {"custom_params": {ANSWERED: 4}}},
        {"params": {"custom_params": "none at all"}},
        {"input_ids": [PROMPT, PROMPT], "rid": None},
    ],
    ids=lambda it: str(it).replace(ANSWERED, "answered"),  # A secret of each process.
)
def test_some_requests_go_as_they_came(options):
    obj, came = asked(**options), []
    guard().generate(lambda *args: came.append(args), Manager(REUSED, guard()), obj)
    ((_, same, _),) = came
    assert same is obj


@pytest.mark.parametrize("parts", [[KEY], [KEY, "cached_tokens"], ["prompt_token_ids"]], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_lacks_a_part_is_not_kept(parts, stream):
    """The answer of a request that was aborted before its first batch has none of these parts."""
    manager, alone = (Manager(REUSED, guard(it)) for it in (1.0, 0.0))
    manager.lacks = alone.lacks = tuple(parts)
    assert served(manager, asked(stream=stream)) == served(alone, asked(stream=stream))
    assert manager.heard == [] and len(manager.asked) == 1


def test_requests_are_chosen_by_their_ids():
    manager = Manager(REUSED, guard(rate=0.2))
    served(manager, *(asked(f"r{i}") for i in range(40)))
    chosen = [it.rid for it in manager.asked if it.rid[0] == "r" and it.return_prompt_token_ids]
    assert 2 <= len(chosen) <= 16 and len(manager.heard) == len(chosen)
    again = Manager(REUSED, guard(rate=0.2))
    served(again, *(asked(it) for it in chosen))
    assert len(again.heard) == len(chosen)


def test_no_user_can_tell_which_ids_are_chosen(monkeypatch):
    places = [shadows.place_of(f"r{i}") for i in range(40)]
    monkeypatch.setattr(shadows, "_KEY", b"another server's")
    assert all(it != shadows.place_of(f"r{i}") for i, it in enumerate(places))


def test_every_answer_of_a_suspect_is_compared():
    manager = Manager(REUSED, guard(rate=0.2))
    manager.suspects = (PLAN,)
    rids = [f"r{i}" for i in range(40)]
    for rid in rids:
        served(manager, asked(rid))
    first = next(i for i, it in enumerate(manager.asked) if it.return_prompt_token_ids)
    assert first < 30 and len(manager.heard) == 40 - first

    manager.label = {**REUSED, "block": [0, 5]}
    num = len(manager.heard)
    for rid in rids:
        served(manager, asked(rid))
    assert 2 <= len(manager.heard) - num <= 16, "another plan is not suspected"


def test_every_answer_by_a_new_pair_is_compared_where_pairs_may_inherit():
    settings = Settings(guard_path="guard.json", shadow_rate=0.0, lines=("line.json",))
    manager = Manager(REUSED, Shadows(settings))
    served(manager, asked("r1"))
    assert len(manager.heard) == 1, "the scheduler has told nothing of the pair"
    pair = {"sender": "S", "receiver": "R", "profile": "", "plans": (), "num_left": 0}
    manager.pairs = (msgspec.convert(pair, WatchedPair),)
    served(manager, asked("r2"))
    served(manager, asked("r3"))
    assert len(manager.heard) == 2, "it knows the pair, and does not suspect its plan"
    manager.label = {**REUSED, "receiver": "an update"}
    served(manager, asked("r4"))
    assert len(manager.heard) == 3


def test_a_run_makes_way_for_who_comes_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(shadows, "_LOOK_S", 0.001)
    manager = Manager(REUSED, guard())
    manager.run_s = 60.0

    def is_own(rid: str) -> bool:
        return rid.startswith("droidspeak-")

    async def meet() -> None:
        async for _ in manager.generate_request(asked()):
            pass
        while not manager.rid_to_state:
            await asyncio.sleep(0.001)
        manager.rid_to_state["another"] = None
        while any(map(is_own, manager.rid_to_state)):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert list(manager.rid_to_state) == ["another"] and manager.heard == []
        manager.run_s = 0.0
        del manager.rid_to_state["another"]
        assert manager.guard._task is not None
        await manager.guard._task

    asyncio.run(asyncio.wait_for(meet(), 10))
    (heard,) = manager.heard
    assert heard.shadow is not None and not heard.missed
    assert [is_own(it.rid) for it in manager.asked] == [False, True, True, True]


def test_runs_have_no_priority_of_their_user():
    manager = Manager(REUSED, guard())
    served(manager, asked(priority=9))
    assert [it.priority for it in manager.asked] == [9, None, None]


def test_a_busy_server_is_left_alone_until_the_deadline():
    time = Sleepless()
    manager = Manager(REUSED, guard(deadline_s=1.0, clock=time.clock))
    served(manager, asked("r1"), asked("r2"), busy_s=10.0, loop=time.loop)
    assert [it.shadow for it in manager.heard] == [None, None]
    assert [it.missed for it in manager.heard] == [{"dropped": 1}] * 2
    assert len(manager.asked) == 2, "nothing else has run"


def test_a_busy_server_compares_within_its_budget():
    time = Sleepless()
    manager = Manager(REUSED, guard(deadline_s=17.0, busy_share=0.2, clock=time.clock))
    manager.run_s = 1.0
    rids = [f"r{i}" for i in range(12)]
    served(manager, *map(asked, rids), busy_s=30.0, loop=time.loop)
    num_compared = sum(it.shadow is not None for it in manager.heard)
    assert num_compared == 2, "four runs of a second: a fifth of 17 s, and less than one run more"
    assert sum(it.missed.get("dropped", 0) for it in manager.heard) == len(rids) - num_compared


def test_a_budget_is_a_share_of_all_time_and_pays_back_what_a_long_run_took():
    now = [0.0]
    budget = Budget(0.01, lambda: now[0])
    used_s = 0.0
    while now[0] < 10_000:
        now[0] += 0.5
        if budget.has_credit():
            budget.charge(7.0)
            used_s += 7.0
            now[0] += 7.0
    assert 93 <= used_s <= 107


def test_no_more_than_so_many_wait():
    manager = Manager(REUSED, guard())
    served(manager, *(asked(f"r{i}") for i in range(MAX_WAITING + 10)))
    num_compared = sum(it.shadow is not None for it in manager.heard)
    assert MAX_WAITING <= num_compared <= MAX_WAITING + 1
    assert sum(it.missed.get("dropped", 0) for it in manager.heard) == 74 - num_compared


def test_a_comparison_that_fails_is_counted_with_the_next(caplog):
    manager = Manager(REUSED, guard())
    manager.fails = True
    served(manager, asked("r1"))
    assert manager.heard == [] and "was not compared" in caplog.text
    manager.fails = False
    served(manager, asked("r2"))
    assert [it.missed for it in manager.heard] == [{"failed": 1}]


@pytest.mark.parametrize(
    ("lora_ids", "outcome"),
    [(["v1", "v2"], "off"), (["v1", "v1", "v2"], "off"), (["v1", "v1", "v1"], "updated")],
)
def test_an_answer_of_replaced_weights_is_not_compared(lora_ids, outcome, caplog):
    manager = Manager(REUSED, guard())
    manager.lora_ids, manager.outcome = [*lora_ids, "v3", "v3", "v3"], outcome
    served(manager, asked("r1", lora_path="x"))
    assert manager.heard == [] and "were replaced before the exact run" in caplog.text
    manager.outcome = "off"
    served(manager, asked("r2", lora_path="x"))
    (heard,) = manager.heard
    assert heard.shadow is not None and heard.missed == {"failed": 1}


@pytest.mark.parametrize("now", [None, "v2"])
def test_an_adapter_that_was_unloaded_is_not_asked_for(now):
    """If the adapter were asked for, SGLang would load it again."""
    manager = Manager(REUSED, guard())

    async def unload() -> None:
        async for _ in manager.generate_request(asked("r1", lora_path="x")):
            pass
        manager.loaded = {} if now is None else {"x": SimpleNamespace(lora_id=now)}
        assert manager.guard._task is not None
        await manager.guard._task

    asyncio.run(unload())
    assert len(manager.asked) == 1
    assert [(it.shadow, it.missed) for it in manager.heard] == [(None, {"dropped": 1})]


def test_what_no_scheduler_heard_of_is_told_again(caplog):
    manager = Manager(REUSED, guard())
    manager.fails = True
    served(manager, asked("r1"))
    manager.fails, manager.is_deaf = False, True
    served(manager, asked("r2"))
    assert "no scheduler" in caplog.text
    manager.is_deaf = False
    served(manager, asked("r3"))
    assert [it.missed for it in manager.heard] == [{"failed": 2}]


def test_a_client_that_goes_away_has_no_shadow():
    manager = Manager(REUSED, guard())

    async def leave() -> None:
        replies = manager.generate_request(asked(stream=True))
        await anext(replies)
        await replies.aclose()
        assert manager.is_left, "SGLang goes on for nobody"

    asyncio.run(leave())
    assert manager.heard == [] and len(manager.asked) == 1
