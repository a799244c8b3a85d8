"""Which answers are compared with an exact run, when, and that their users see nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from math import log
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput

from cachetree.planning import PlanId
from sglang_droidspeak.engine import asking
from sglang_droidspeak.engine.asking import ANSWERED
from sglang_droidspeak.guard import shadows
from sglang_droidspeak.guard.distance import TOP, total_variation
from sglang_droidspeak.guard.plans import NOISE, GuardQuestion, GuardState
from sglang_droidspeak.guard.shadows import MAX_WAITING, Shadows
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
SERVED, EXACT = 0.9, 0.4
"""How likely token 1 is; token 2 has the rest."""


def entries(likely: float) -> list[tuple[float, int, None]]:
    return [(log(likely), 1, None), (log(1 - likely), 2, None)]


class Manager:
    """Stands for SGLang's TokenizerManager, whose answers are ten times token 1."""

    preferred_sampling_params: Any = None

    def __init__(self, told: dict[str, Any], guard: Shadows, *, is_delta: bool = False) -> None:
        self.told, self.guard = told, guard
        self.incremental_streaming_output = is_delta
        self.rid_to_state: dict[str, None] = {}
        self.heard: list[GuardQuestion] = []
        self.asked: list[Any] = []
        self.suspects: tuple[PlanId, ...] = ()
        self.lora_ids = ["id"]
        """What the name of an adapter means, one request after another."""
        self.loaded: dict[str, Any] = {}
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: self.loaded)
        self.lacks: tuple[str, ...] = ()
        """Parts of an answer."""
        self.exact_s = 0.0
        """How long an exact run takes."""
        self.outcome = "off"
        """Of exact runs."""
        self.fails = False
        self.is_deaf = False
        self.is_left = False
        """Somebody went away, and it was told."""

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
        if ANSWERED in (obj.sampling_params.get("custom_params") or {}):
            if self.fails:
                raise ValueError("no room")
            self.rid_to_state[obj.rid] = None
            try:
                await asyncio.sleep(self.exact_s)
            finally:
                del self.rid_to_state[obj.rid]
            num = len(obj.input_ids) - len(PROMPT)
            meta |= {
                KEY: [{"outcome": self.outcome}],
                "input_token_logprobs": [None, *[entries(EXACT)[0]] * num],
                "input_top_logprobs": [None, *[entries(EXACT)] * num],
            }
            yield {"output_ids": [], "meta_info": meta}
            return
        for start in (0, 3, 6, 9) if obj.stream else (9,):
            since = start - 3 * (start > 0) if self.incremental_streaming_output else 0
            num = start + 1 - (since + 1 if since else 0) if obj.stream else 10
            reply = {"output_ids": [1] * num, "text": "", "meta_info": {**meta, KEY: [self.told]}}
            if obj.return_logprob:
                reply["meta_info"] |= {
                    "input_token_logprobs": [],
                    "output_token_logprobs": [entries(SERVED)[0]] * num,
                    "output_token_logprobs_length": num,
                    "output_top_logprobs": [entries(SERVED)] * num,
                }
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

    async def get_internal_state_communicator(self, asked: Any) -> list[Any]:
        page, question = asking.asked(asked)
        assert page == asking.GUARD
        if self.is_deaf:
            raise TimeoutError("no scheduler")
        self.heard.append(msgspec.json.decode(question, type=GuardQuestion))
        state = GuardState(shadow_rate=1.0, pairs=(), suspects=self.suspects)
        return [SimpleNamespace(internal_state={KEY: msgspec.to_builtins(state)})]

    def auto_create_handle_loop(self) -> None: ...


def asked(rid: str = "r1", /, **options: Any) -> GenerateReqInput:
    params = {"temperature": 0, **options.pop("params", {})}
    fixed = {"input_ids": list(PROMPT), "rid": rid, "sampling_params": params}
    return GenerateReqInput(**{**fixed, **options})


def served(manager: Manager, *objs: Any, busy_s: float = 0.0) -> list[list[Any]]:
    """The replies to each, once no comparison waits; busy for so long after the last."""

    async def ask() -> list[list[Any]]:
        manager.rid_to_state["another"] = None
        found = []
        for obj in objs:
            found.append([it async for it in manager.generate_request(obj)])
        await asyncio.sleep(busy_s)
        del manager.rid_to_state["another"]
        if manager.guard._task is not None:
            await manager.guard._task
        return found

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def _one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run chooses the same requests."""
    monkeypatch.setattr(shadows, "_KEY", b"a server's")


def guard(rate: float = 1.0, deadline_s: float = 10.0) -> Shadows:
    settings = {"shadow_rate": rate, "shadow_deadline_s": deadline_s, "guard_path": "guard.json"}
    return Shadows(Settings(**settings))


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_compared_and_its_user_sees_nothing(stream: bool, is_delta: bool) -> None:
    manager = Manager(REUSED, guard(), is_delta=is_delta)
    (replies,) = served(manager, asked(stream=stream))
    alone = Manager(REUSED, guard(rate=0.0), is_delta=is_delta)
    assert [replies] == served(alone, asked(stream=stream))
    assert alone.heard == [] and not alone.asked[0].return_logprob
    (heard,) = manager.heard
    assert heard.shadow is not None and heard.shadow.plan == PLAN
    assert heard.shadow.tv == pytest.approx(SERVED - EXACT)
    user, exact = manager.asked
    assert (user.return_logprob, user.top_logprobs_num) == (True, 20)
    assert list(exact.input_ids) == [*PROMPT, *[1] * 8]


def test_ids_of_the_prompt_are_shown_to_who_asks() -> None:
    (replies,) = served(Manager(REUSED, guard()), asked(return_prompt_token_ids=True))
    assert replies[-1]["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize(
    "told",
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
def test_what_reused_nothing_approximate_has_no_shadow(told: dict[str, Any]) -> None:
    manager = Manager(told, guard())
    served(manager, asked())
    assert manager.heard == [] and len(manager.asked) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"return_logprob": True},
        {"params": {"n": 2}},
        {"params": {"regex": "a*"}},
        {"params": {"frequency_penalty": 0.5}},
        {"params": {"temperature": 0.5, "top_k": 1}},
        {"params": {"temperature": "hot"}},
        {"params": {"temperature": float("nan")}},
        {"params": {"temperature": -1}},
        {"params": {"ignore_eos": True}},
        {"params": {"custom_params": {"droidspeak": {"mode": "off"}}}},
        {"params": {"custom_params": {"droidspeak": {"blok": "1:2"}}}},
        {"params": {"custom_params": {ANSWERED: 4}}},
        {"params": {"custom_params": "none at all"}},
        {"input_ids": [PROMPT, PROMPT], "rid": None},
    ],
    ids=lambda it: str(it).replace(ANSWERED, "answered"),  # A secret of each process.
)
def test_some_requests_go_as_they_came(options: dict[str, Any]) -> None:
    obj, came = asked(**options), []
    guard().generate(lambda *args: came.append(args), Manager(REUSED, guard()), obj)
    ((_, same, _),) = came
    assert same is obj and obj.top_logprobs_num in (None, 0)


@pytest.mark.parametrize(
    "option",
    [
        {"logprob_start_len": 0},
        {"logprob_start_len": 10**6},
        {"token_ids_logprob": [1]},
        {"return_flat_raw_top_logprobs": True},
        {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
    ],
    ids=str,
)
def test_what_sglang_ignores_without_log_probabilities_stays_without_effect(
    option: dict[str, Any],
) -> None:
    manager = Manager(REUSED, guard())
    served(manager, asked(), asked("r2", **option))
    plain, user, *_ = manager.asked
    named = [*option, "logprob_start_len", "token_ids_logprob"]
    assert [getattr(user, it) for it in named] == [getattr(plain, it) for it in named]
    assert len(manager.heard) == 2


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        ["output_top_logprobs"],
        ["output_token_logprobs"],
        [KEY],
        [KEY, "cached_tokens"],  # Aborted before it was in a batch.
        ["prompt_token_ids"],
    ],
)
def test_an_answer_that_lacks_a_part_is_not_kept(parts: list[str], is_delta: bool) -> None:
    manager, alone = (Manager(REUSED, guard(it), is_delta=is_delta) for it in (1.0, 0.0))
    manager.lacks = alone.lacks = tuple(parts)
    assert served(manager, asked(stream=is_delta)) == served(alone, asked(stream=is_delta))
    assert manager.heard == [] and len(manager.asked) == 1


def farthest(temperature: float) -> float:
    """How far an exact run seems from itself, served at that temperature, as SGLang says it in
    float32."""
    at = 1.0 if temperature < 1e-6 else temperature
    found = []
    for nearest in ([14.0, 13.0, 12.0], [20.0, 8.0, 8.0], [2.0, 1.0, 0.0]):
        logits = torch.randn(32000, generator=torch.Generator().manual_seed(1))
        logits[:3] += torch.tensor(nearest)
        probs = torch.softmax(logits / at, -1)
        lowest = torch.finfo(torch.float32).min
        sides = [torch.log(probs).clamp(min=lowest), torch.log_softmax(logits, -1)]
        tops = [it.topk(TOP) for it in sides]
        served, exact = (
            dict(zip(it.indices.tolist(), it.values.tolist(), strict=True)) for it in tops
        )
        found.append(total_variation(served, exact, temperature))
    return max(found)


@pytest.mark.parametrize("temperature", [1e-7, 1e-3, 0.01, 0.05, 0.1, 0.3, 0.7, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("is_original", [False, True])
def test_temperatures_at_which_nothing_can_be_told_have_no_shadow(
    temperature: float, is_original: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", str(is_original))
    manager = Manager(REUSED, guard())
    served(manager, asked(params={"temperature": temperature}))
    is_compared = len(manager.heard) == 1
    assert is_compared == (temperature <= 1 and (is_original or temperature >= 0.1))
    assert is_original or not is_compared or farthest(temperature) < NOISE / 4


def test_at_low_temperatures_an_exact_run_seems_far_from_itself() -> None:
    assert all(farthest(it) > NOISE for it in (1e-7, 1e-3, 0.01))


def test_requests_are_chosen_by_their_ids() -> None:
    manager = Manager(REUSED, guard(rate=0.2))
    served(manager, *(asked(f"r{i}") for i in range(40)))
    users = [it for it in manager.asked if it.rid.startswith("r")]
    chosen = [it.rid for it in users if it.return_logprob]
    assert 2 <= len(chosen) <= 16 and len(manager.heard) == len(chosen)
    again = Manager(REUSED, guard(rate=0.2))
    served(again, *(asked(it) for it in chosen))
    assert len(again.heard) == len(chosen)


def test_no_user_can_tell_which_ids_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [shadows.place_of(f"r{i}") for i in range(40)]
    monkeypatch.setattr(shadows, "_KEY", b"another server's")
    assert all(it != shadows.place_of(f"r{i}") for i, it in enumerate(places))


def test_every_answer_of_a_suspect_is_compared() -> None:
    manager = Manager(REUSED, guard(rate=0.2))
    manager.suspects = (PLAN,)
    rids = [f"r{i}" for i in range(40)]
    for rid in rids:
        served(manager, asked(rid))
    first = next(i for i, it in enumerate(manager.asked) if it.return_logprob)
    assert first < 30 and len(manager.heard) == 40 - first

    manager.told = {**REUSED, "block": [0, 5]}
    num = len(manager.heard)
    for rid in rids:
        served(manager, asked(rid))
    assert 2 <= len(manager.heard) - num <= 16, "another plan is not suspected"


def test_suspicions_lapse_while_nothing_is_compared() -> None:
    """A plan that nobody uses any more does not have every request looked at for ever."""
    manager = Manager(REUSED, guard(rate=0.2))
    manager.suspects = (PLAN,)
    chosen = next(f"c{i}" for i in range(99) if shadows.place_of(f"c{i}") < 0.2)
    others = [it for it in map(str, range(400)) if shadows.place_of(it) >= 0.2]
    for _ in range(2):
        manager.told = REUSED
        served(manager, asked(chosen))
        manager.told = {"outcome": "no_match", "exact": True}
        manager.asked.clear()
        served(manager, *map(asked, others))
        looked_at = [it.rid for it in manager.asked if it.return_logprob]
        assert looked_at == others[:MAX_WAITING]


def test_a_full_waiting_list_has_no_more_requests_looked_at() -> None:
    manager = Manager(REUSED, guard(rate=0.2))
    manager.guard._suspects = frozenset([PLAN])
    chosen = [it for it in map(str, range(900)) if shadows.place_of(it) < 0.2]
    other = next(it for it in map(str, range(900)) if shadows.place_of(it) >= 0.2)
    # One of them waits outside of the list for a moment in which no request runs.
    served(manager, *map(asked, chosen[: MAX_WAITING + 1]), asked(other))
    assert next(it for it in manager.asked if it.rid == other).return_logprob is False


def test_an_exact_run_makes_way_for_who_comes_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadows, "_LOOK_S", 0.001)
    manager = Manager(REUSED, guard())
    manager.exact_s = 60.0

    def is_exact_run(rid: str) -> bool:
        return rid.startswith("droidspeak-")

    async def meet() -> None:
        async for _ in manager.generate_request(asked()):
            pass
        while not manager.rid_to_state:
            await asyncio.sleep(0.001)
        manager.rid_to_state["another"] = None
        while any(map(is_exact_run, manager.rid_to_state)):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert list(manager.rid_to_state) == ["another"] and manager.heard == []
        manager.exact_s = 0.0
        del manager.rid_to_state["another"]
        assert manager.guard._task is not None
        await manager.guard._task

    asyncio.run(asyncio.wait_for(meet(), 10))
    (heard,) = manager.heard
    assert heard.shadow is not None and not heard.missed
    assert [is_exact_run(it.rid) for it in manager.asked] == [False, True, True]


def test_an_exact_run_has_no_priority_of_its_user() -> None:
    manager = Manager(REUSED, guard())
    served(manager, asked(priority=9))
    assert [it.priority for it in manager.asked] == [9, None]


def test_a_busy_server_is_left_alone_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "_LOOK_S", 0.001)
    manager = Manager(REUSED, guard(deadline_s=0.02))
    served(manager, asked("r1"), asked("r2"), busy_s=0.2)
    assert [it.shadow for it in manager.heard] == [None, None]
    assert [it.missed for it in manager.heard] == [{"dropped": 1}] * 2
    assert len(manager.asked) == 2, "nothing else has run"


def test_no_more_than_so_many_wait() -> None:
    manager = Manager(REUSED, guard())
    served(manager, *(asked(f"r{i}") for i in range(MAX_WAITING + 10)))
    num_compared = sum(it.shadow is not None for it in manager.heard)
    assert MAX_WAITING <= num_compared <= MAX_WAITING + 1
    assert sum(it.missed.get("dropped", 0) for it in manager.heard) == 74 - num_compared


def test_a_comparison_that_fails_is_counted_with_the_next(caplog: Any) -> None:
    manager = Manager(REUSED, guard())
    manager.fails = True
    served(manager, asked("r1"))
    assert manager.heard == [] and "was not compared" in caplog.text
    manager.fails = False
    served(manager, asked("r2"))
    assert [it.missed for it in manager.heard] == [{"failed": 1}]


@pytest.mark.parametrize(
    ("lora_ids", "outcome"), [(["v1", "v2"], "off"), (["v1", "v1"], "weights_updated")]
)
def test_an_answer_of_replaced_weights_is_not_compared(
    lora_ids: list[str], outcome: str, caplog: Any
) -> None:
    manager = Manager(REUSED, guard())
    manager.lora_ids, manager.outcome = [*lora_ids, "v2", "v2"], outcome
    served(manager, asked("r1", lora_path="x"))
    assert manager.heard == [] and "were replaced before the exact run" in caplog.text
    manager.outcome = "off"
    served(manager, asked("r2", lora_path="x"))
    (heard,) = manager.heard
    assert heard.shadow is not None and heard.missed == {"failed": 1}


@pytest.mark.parametrize("now", [None, "v2"])
def test_an_adapter_that_was_unloaded_is_not_asked_for(now: str | None) -> None:
    """SGLang would load it again."""
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


def test_what_no_scheduler_heard_of_is_told_again(caplog: Any) -> None:
    manager = Manager(REUSED, guard())
    manager.fails = True
    served(manager, asked("r1"))
    manager.fails, manager.is_deaf = False, True
    served(manager, asked("r2"))
    assert "no scheduler" in caplog.text
    manager.is_deaf = False
    served(manager, asked("r3"))
    assert [it.missed for it in manager.heard] == [{"failed": 2}]


def test_a_client_that_goes_away_has_no_shadow() -> None:
    manager = Manager(REUSED, guard())

    async def leave() -> None:
        replies = manager.generate_request(asked(stream=True))
        await anext(replies)
        await replies.aclose()
        assert manager.is_left, "SGLang goes on for nobody"

    asyncio.run(leave())
    assert manager.heard == [] and len(manager.asked) == 1
