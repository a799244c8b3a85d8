"""Verified answers: what is sent is what full prefill would have sent, whatever was drafted."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.exceptions import HTTPException

from sglang_droidspeak.engine import own
from sglang_droidspeak.guard.exact import argmax, exact_run
from sglang_droidspeak.guard.verify import VerifiedAnswers
from sglang_droidspeak.start.config import Settings

EOS = 0
PROMPT = [7, 3, 9, 4]
LAG = 6
ASKED, ALWAYS = Settings(verify_lag=LAG), Settings(verify="always", verify_lag=LAG)
CLOSED: Any = object()


def exact(tokens: list[int]) -> int:
    """What full prefill says next: a letter, or the end."""
    drawn = Random(str(tokens)).randrange(30)
    return EOS if drawn == 29 else 97 + drawn % 26


def never(_tokens: list[int]) -> bool:
    return False


@dataclass
class Manager:
    """Stands for SGLang's TokenizerManager and scheduler, which answer from `exact`, and otherwise
    where a request may be approximate and `differs` from it."""

    differs: Callable[[list[int]], bool] = never
    incremental_streaming_output: bool = False
    preferred_sampling_params: dict[str, Any] | None = None
    is_approximate: bool = True
    strikes: dict[str, Any] = field(default_factory=dict)
    """By phase: a reason to finish with, or an exception."""
    answers: VerifiedAnswers = field(default_factory=lambda: VerifiedAnswers(ASKED))
    phases: list[str] = field(default_factory=list)
    """Those that ran, and `-` before the name of each that was closed before its end."""

    def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        return self.answers.generate(Manager._plain, self, obj, request)

    async def _plain(self, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
        obj.normalize_batch_and_arguments()
        params = {**(self.preferred_sampling_params or {}), **obj.sampling_params}
        custom = params.get("custom_params") or {}
        phase = "check" if obj.return_logprob else "rest" if own.ANSWERED in custom else "draft"
        self.phases.append(phase)
        try:
            await asyncio.sleep(0)
            if isinstance(strike := self.strikes.get(phase), Exception):
                raise strike
            replies = self._check(obj) if obj.return_logprob else self._answer(obj, params)
            for reply in replies:
                if strike is not None and len(reply["output_ids"]) >= 3 * (phase != "check"):
                    reply["meta_info"]["finish_reason"] = strike
                yield reply
                if strike is not None and reply["meta_info"]["finish_reason"]:
                    break
        except GeneratorExit:
            if not reply["meta_info"]["finish_reason"]:
                self.phases.append(f"-{phase}")
            raise

    def _check(self, obj: Any) -> list[Any]:
        ids, start = obj.input_ids, obj.logprob_start_len
        tops, served = [None], [(None, ids[start], None)]
        for at in range(start + 1, len(ids)):
            best = exact(ids[:at])
            tops.append([(-0.5, best, None), (-1.5, best + 1, None)])
            served.append((-0.5 if ids[at] == best else -4.0, ids[at], None))
        meta = {
            "finish_reason": {"type": "length"},
            "input_token_logprobs": served,
            "input_top_logprobs": tops,
            "cached_tokens": 2,
        }
        assert obj.sampling_params["custom_params"]["droidspeak"]["mode"] == "off"
        return [{"output_ids": [], "text": "", "meta_info": meta}]

    def _answer(self, obj: Any, params: dict[str, Any]) -> list[Any]:
        custom = params.get("custom_params") or {}
        most = params.get("max_new_tokens", 128)
        req: Any = SimpleNamespace(
            origin_input_ids=array("q", obj.input_ids),
            output_ids=array("q"),
            return_logprob=False,
            sampling_params=SimpleNamespace(custom_params=custom, max_new_tokens=most),
        )
        own.go_on(req)
        controls = custom.get("droidspeak", {})
        is_approximate = self.is_approximate and controls.get("mode") != "off"
        told: dict[str, Any] = {"outcome": "reused", "exact": not is_approximate}
        if is_approximate and (num := own.end_draft(req)):
            told["draft_ends"] = num
        ids, num_sent, replies = list(req.output_ids), 0, []
        while not replies or not replies[-1]["meta_info"]["finish_reason"]:
            sofar = [*req.origin_input_ids, *ids]
            token = exact(sofar)
            ids.append(token + 1 if is_approximate and self.differs(sofar) else token)
            finish = self._finish(ids, params, req.sampling_params.max_new_tokens)
            is_delta = obj.stream and self.incremental_streaming_output
            sent = ids[num_sent:] if is_delta else ids
            text = "".join(chr(it) for it in sent if it != EOS)
            meta = {
                "id": obj.rid,
                "finish_reason": finish,
                "prompt_tokens": len(req.origin_input_ids),
                "completion_tokens": len(ids),
                "cached_tokens": 99,
                "droidspeak": [] if is_delta and num_sent else [told],
            }
            reply = {"output_ids": list(sent), "text": text, "meta_info": meta}
            if obj.return_prompt_token_ids:
                reply["prompt_token_ids"] = list(obj.input_ids)
            num_sent = len(ids)
            if obj.stream or finish:
                replies.append(reply)
        return replies

    @staticmethod
    def _finish(ids: list[int], params: dict[str, Any], most: int) -> Any:
        text = "".join(map(chr, ids))
        if any(it in text for it in params.get("stop") or ()):
            return {"type": "stop", "matched": params["stop"][0]}
        if ids[-1] == EOS and not params.get("ignore_eos"):
            return {"type": "stop", "matched": EOS}
        return {"type": "length", "length": len(ids)} if len(ids) >= most else None


def asked(droidspeak: dict[str, Any] | None = None, **options: Any) -> GenerateReqInput:
    params = {"temperature": 0, "max_new_tokens": 20, **options.pop("params", {})}
    controls = {"verify": True} if droidspeak is None else droidspeak
    params["custom_params"] = {"droidspeak": controls}
    return GenerateReqInput(
        **{"input_ids": list(PROMPT), "rid": "r1", "sampling_params": params, **options}
    )


def replies_of(manager: Manager, obj: Any, http: Any = None) -> list[Any]:
    async def collect() -> list[Any]:
        return [it async for it in manager.generate_request(obj, http)]

    return asyncio.run(collect())


def told_of(reply: Any) -> tuple[bool, tuple[int, ...] | None]:
    (entry,) = reply["meta_info"]["droidspeak"]
    assert "draft_ends" not in entry
    verified = entry.get("verified")
    return entry["exact"], None if verified is None else tuple(verified.values())


def full_prefill(**options: Any) -> Any:
    return replies_of(Manager(), asked({"mode": "off"}, **options))[-1]


SHOWN = ("id", "finish_reason", "prompt_tokens", "completion_tokens")


def assert_same(reply: Any, expected: Any) -> None:
    assert (reply["output_ids"], reply["text"]) == (expected["output_ids"], expected["text"])
    for name in SHOWN:
        assert reply["meta_info"][name] == expected["meta_info"][name]


def at(*positions: int) -> Callable[[list[int]], bool]:
    return lambda tokens: len(tokens) - len(PROMPT) in positions


ALL = range(1000)


@pytest.mark.parametrize(
    ("differs", "verified", "phases"),
    [
        (never, (LAG, LAG, 0), ["draft", "check", "rest"]),
        (at(4), (LAG, 4, 2), ["draft", "check", "rest"]),
        (at(*ALL), (LAG, 0, LAG), ["draft", "check", "rest"]),
        (at(LAG), (LAG, LAG, 0), ["draft", "check", "rest"]),
    ],
)
def test_the_answer_is_full_prefills(differs, verified, phases) -> None:
    manager = Manager(differs)
    (reply,) = replies_of(manager, asked())
    assert_same(reply, full_prefill())
    assert (told_of(reply), manager.phases) == ((True, verified), phases)
    assert reply["meta_info"]["cached_tokens"] == 2, "what full prefill would have found"
    assert "prompt_token_ids" not in reply


def test_a_draft_that_ends_by_itself_and_agrees_is_the_answer() -> None:
    manager = Manager()
    (reply,) = replies_of(manager, asked(params={"max_new_tokens": LAG - 1}))
    assert_same(reply, full_prefill(params={"max_new_tokens": LAG - 1}))
    assert told_of(reply) == (True, (LAG - 1, LAG - 1, 0))
    assert manager.phases == ["draft", "check"]


def test_a_draft_that_is_as_long_as_the_answer_may_be_is_not_cut() -> None:
    manager = Manager()
    (reply,) = replies_of(manager, asked(params={"max_new_tokens": LAG}))
    assert_same(reply, full_prefill(params={"max_new_tokens": LAG}))
    assert manager.phases == ["draft", "check"]


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_any_answer_is_full_prefills(seed: int, stream: bool, is_incremental: bool) -> None:
    """Ends, stops and lengths anywhere; nothing that is streamed is taken back."""
    random = Random(seed)
    prompt = [random.randrange(1, 99) for _ in range(5)]
    positions = at(*random.sample(range(1, 30), 4))
    params = {
        "max_new_tokens": random.choice([0, 1, 3, LAG, LAG + 1, 25]),
        "stop": random.choice([None, [chr(random.randrange(97, 123))]]),
        "ignore_eos": random.random() < 0.3,
    }
    options = {"input_ids": prompt, "params": params}
    manager = Manager(positions, is_incremental)
    replies = replies_of(manager, asked(stream=stream, **options))
    expected = full_prefill(**options)
    if stream and is_incremental:
        ids = [token for it in replies for token in it["output_ids"]]
        text = "".join(it["text"] for it in replies)
        assert_same({**replies[-1], "output_ids": ids, "text": text}, expected)
    else:
        assert_same(replies[-1], expected)
        for reply in replies:
            num = len(reply["output_ids"])
            assert reply["output_ids"] == expected["output_ids"][:num]
            assert expected["text"].startswith(reply["text"])
    assert all(told_of(it)[0] for it in replies)
    assert stream or len(replies) == 1


def test_what_was_drafted_is_streamed_when_it_is_confirmed() -> None:
    replies = replies_of(Manager(at(4)), asked(stream=True))
    assert [len(it["output_ids"]) for it in replies[:3]] == [5, 6, 7]


def test_a_request_without_reuse_goes_its_way() -> None:
    """One request, streamed as it comes, and the prompt's ids only where they were asked for."""
    for return_ids in (False, True):
        manager = Manager(is_approximate=False)
        replies = replies_of(manager, asked(stream=True, return_prompt_token_ids=return_ids))
        assert manager.phases == ["draft"]
        assert [len(it["output_ids"]) for it in replies] == list(range(1, len(replies) + 1))
        assert told_of(replies[0]) == (True, None)
        assert all(it.get("prompt_token_ids") == (PROMPT if return_ids else None) for it in replies)


def test_ids_of_the_prompt_are_the_prompts() -> None:
    (reply,) = replies_of(Manager(at(4)), asked(return_prompt_token_ids=True))
    assert reply["prompt_token_ids"] == PROMPT


def test_parameters_that_the_server_prefers_count() -> None:
    manager = Manager(at(4), preferred_sampling_params={"max_new_tokens": 9, "temperature": 0})
    obj = asked()
    del obj.sampling_params["max_new_tokens"], obj.sampling_params["temperature"]
    (reply,) = replies_of(manager, obj)
    assert_same(reply, full_prefill(params={"max_new_tokens": 9}))
    assert manager.phases == ["draft", "check", "rest"]


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"temperature": 0.7}},
        {"params": {"n": 2}},
        {"params": {"regex": "a*"}},
        {"params": {"min_new_tokens": 3}},
        {"params": {"repetition_penalty": 1.1}},
        {"params": {"logit_bias": {"5": 1.0}}},
        {"return_logprob": True},
        {"return_hidden_states": True},
        {"input_ids": [PROMPT, PROMPT], "rid": None},
    ],
    ids=str,
)
def test_what_cannot_be_checked_goes_to_the_planner_as_it_came(options: dict[str, Any]) -> None:
    """Which has it prefilled in full, because it still says that it is to be verified."""
    obj, came = asked(**options), []
    VerifiedAnswers(ASKED).generate(lambda *args: came.append(args), Manager(), obj)
    ((_, same, _),) = came
    assert same is obj
    assert obj.sampling_params["custom_params"] == {"droidspeak": {"verify": True}}


@pytest.mark.parametrize(
    ("settings", "controls", "is_verified"),
    [
        (ASKED, {}, False),
        (ASKED, {"verify": False}, False),
        (ASKED, {"verify": "yes"}, False),
        (ASKED, {"verify": True, "mode": "off"}, False),
        (ALWAYS, {}, True),
        (ALWAYS, {"verify": False}, False),
        (ALWAYS, {"mode": "off"}, False),
        (ALWAYS, "no controls at all", False),
    ],
)
def test_who_is_verified(settings: Settings, controls: Any, is_verified: bool) -> None:
    found = VerifiedAnswers(settings).generate(lambda *_: CLOSED, Manager(), asked(controls))
    assert (found is not CLOSED) == is_verified


def test_embeddings_and_requests_without_parameters_are_left_alone() -> None:
    answers = VerifiedAnswers(ALWAYS)
    for obj in (SimpleNamespace(sampling_params={}), GenerateReqInput(text="x")):
        assert answers.generate(lambda *_: CLOSED, Manager(), obj) is CLOSED


GONE = {"type": "abort", "message": "Aborted", "status_code": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["draft", "check", "rest"])
def test_an_abort_ends_it_in_every_phase(phase: str, stream: bool) -> None:
    """With nothing that was not confirmed."""
    manager = Manager(at(4), strikes={phase: GONE})
    replies = replies_of(manager, asked(stream=stream))
    last, expected = replies[-1], full_prefill()
    assert last["meta_info"]["finish_reason"] == GONE
    assert manager.phases[-1] == phase
    if phase == "rest":
        num = len(last["output_ids"])
        assert last["output_ids"] == expected["output_ids"][:num]
    else:
        assert (last["output_ids"], last["text"]) == ([], "")
        assert last["meta_info"]["completion_tokens"] == 0


@pytest.mark.parametrize("failure", [ValueError("no"), HTTPException(503, "no room")])
def test_where_the_check_fails_the_answer_is_made_by_full_prefill(failure: Exception) -> None:
    manager = Manager(at(*ALL), strikes={"check": failure})
    (reply,) = replies_of(manager, asked())
    assert_same(reply, full_prefill())
    assert told_of(reply) == (True, (LAG, 0, LAG))


@pytest.mark.parametrize("phase", ["draft", "rest"])
def test_what_sglang_raises_is_raised(phase: str) -> None:
    with pytest.raises(HTTPException):
        replies_of(Manager(at(4), strikes={phase: HTTPException(503, "no room")}), asked())


def test_nothing_is_begun_for_a_client_that_is_gone() -> None:
    async def is_disconnected() -> bool:
        return True

    manager = Manager(strikes={"check": ValueError("disconnected")})
    with pytest.raises(ValueError, match="disconnected"):
        replies_of(manager, asked(), SimpleNamespace(is_disconnected=is_disconnected))
    assert manager.phases == ["draft", "check"]


@pytest.mark.parametrize(
    ("is_approximate", "phases"),
    [(True, ["draft", "check", "rest", "-rest"]), (False, ["draft", "-draft"])],
)
def test_a_stream_that_is_closed_closes_what_runs(is_approximate: bool, phases: list[str]) -> None:
    manager = Manager(at(2), is_approximate=is_approximate)

    async def one() -> None:
        replies = manager.generate_request(asked(stream=True))
        await anext(replies)
        await replies.aclose()

    asyncio.run(one())
    assert manager.phases == phases


def test_an_exact_run_says_the_likeliest_and_the_served() -> None:
    manager = Manager()
    like = asked(lora_path=None, extra_key="tenant", cache_salt="salt")
    best = exact(PROMPT)
    found, meta = asyncio.run(exact_run(manager, PROMPT, [best, 5], like))
    assert sorted(found[0].items()) == [(best, -0.5), (best + 1, -1.5)]
    assert found[1][5] == -4.0
    assert [argmax(it) for it in found] == [best, exact([*PROMPT, best])]
    assert meta["cached_tokens"] == 2


def test_of_equals_the_first_is_taken() -> None:
    assert argmax({9: -0.1, 4: -0.1, 2: -3.0}) == 4


@pytest.mark.parametrize("num", [0, -1, 4, 99, "2", None])
def test_a_number_that_cannot_be_leaves_the_request_whole(num: Any) -> None:
    """Anybody can write `custom_params`."""
    params = SimpleNamespace(custom_params={own.ANSWERED: num, own.DRAFT: num}, max_new_tokens=3)
    ids = array("q", PROMPT)
    req: Any = SimpleNamespace(
        origin_input_ids=ids, output_ids=array("q"), return_logprob=False, sampling_params=params
    )
    own.go_on(req)
    assert (req.origin_input_ids, list(req.output_ids), params.max_new_tokens) == (ids, [], 3)
    assert own.end_draft(req) is None
