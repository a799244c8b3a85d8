"""Verified answers: they begin as a draft from approximate KV, and none of it is sent unconfirmed.

    draft   the user's request as it is. If it reads exact KV only, this is the answer. Otherwise it
            ends after `verify_lag` tokens, and what it says is held back
    check   an exact run of prompt and draft: which of its tokens would full prefill have made?
    answer  all of them, and the draft ended by itself: the draft. Otherwise the request goes on
            after those that agree, from the exact KV that the check has left

All three are SGLang's requests under the user's id, one after the other, so whoever aborts it or
goes away ends whichever runs. What cannot be checked goes its way, and the planner has it prefilled
in full: a request that samples, has several answers, wants log-probabilities, or whose likeliest
token is not what greedy sampling takes (penalties, grammars). Event loop of the front end only.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.exceptions import HTTPException

from sglang_droidspeak.engine.own import ANSWERED, DRAFT
from sglang_droidspeak.guard.exact import ExactRunAborted, argmax, exact_run
from sglang_droidspeak.guard.plain import controls_of, plain_params
from sglang_droidspeak.request.meta_info import DRAFT_ENDS, KEY, Verified

if TYPE_CHECKING:
    from sglang_droidspeak.start.config import Settings

log = logging.getLogger(__name__)

Reply = dict[str, Any]
"""As SGLang's `/generate` sends it: `output_ids`, `text` and `meta_info`."""
Ask = Callable[[Any, Any], AsyncGenerator[Reply, None]]
"""SGLang's TokenizerManager.generate_request: of a GenerateReqInput, and of a client or None."""

_DEFAULT_NEW_TOKENS: Final = 128
"""SGLang's, where a request says nothing."""
_CACHED: Final = ("cached_tokens", "cached_tokens_details")
"""What `meta_info` says of KV that was there."""


class VerifiedAnswers:
    def __init__(self, settings: Settings) -> None:
        self._settings: Final = settings

    def generate(self, original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        """Hooks TokenizerManager.generate_request, which returns an async generator."""
        params = plain_params(obj, manager) or {}
        # Greedy sampling takes the likeliest token each time.
        is_greedy = params.get("temperature") == 0 or params.get("top_k") == 1
        controls = controls_of(params) if is_greedy else None
        if controls is None or not controls.is_verified(self._settings):
            return original(manager, obj, request)
        return self._verified(manager, partial(original, manager), obj, request)

    async def _verified(
        self, manager: Any, ask: Ask, obj: Any, http: Any
    ) -> AsyncGenerator[Reply, None]:
        obj.normalize_batch_and_arguments()
        draft = _Draft(obj, is_incremental=obj.stream and manager.incremental_streaming_output)
        async with aclosing(ask(draft.request(self._settings.verify_lag), http)) as replies:
            async for reply in replies:
                draft.add(reply)
                if draft.is_exact:
                    yield draft.shown(reply)
        if draft.is_exact:
            return
        if draft.finish["type"] == "abort":
            yield draft.aborted(draft.finish)
            return
        try:
            agreed, check = await _check(manager, draft, http)
        except ExactRunAborted as exc:
            yield draft.aborted(exc.finish_reason)
            return
        if agreed == len(draft.tokens) and not draft.is_cut:
            yield draft.verified(draft.whole(), agreed, check)
            return
        rest = draft.rest(agreed, manager.preferred_sampling_params or {})
        async with aclosing(ask(rest, http)) as replies:
            async for reply in replies:
                yield draft.verified(reply, agreed, check)


@dataclass(slots=True, eq=False)
class _Draft:
    """What has come of the user's request `obj`, as it is."""

    obj: Any
    is_incremental: bool
    """Whether each reply says what is new, not all there is."""
    prompt_ids: Sequence[int] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    """What droidspeak says of it, with its first reply."""
    replies: list[Reply] = field(default_factory=list)
    """Those held back."""

    @property
    def is_exact(self) -> bool:
        """Where nothing is told, nothing has loaded: health checks, and what has failed before."""
        return bool(self.told.get("exact", True))

    @property
    def finish(self) -> Mapping[str, Any]:
        return self.replies[-1]["meta_info"]["finish_reason"]

    @property
    def is_cut(self) -> bool:
        """Whether it would have said more."""
        return DRAFT_ENDS in self.told and self.finish["type"] == "length"

    @property
    def tokens(self) -> list[int]:
        return self.whole()["output_ids"]

    def request(self, lag: int) -> Any:
        asked = copy(self.obj)
        asked.return_prompt_token_ids = True
        asked.sampling_params = _with(asked.sampling_params, {DRAFT: lag}, verify=False)
        return asked

    def add(self, reply: Reply) -> None:
        self.prompt_ids = reply.pop("prompt_token_ids", self.prompt_ids)
        self.told = (reply["meta_info"].get(KEY) or [self.told])[0]
        if not self.is_exact:
            self.replies.append(reply)

    def whole(self) -> Reply:
        """All of it, in one reply."""
        last = self.replies[-1]
        if not self.is_incremental:
            return last
        ids = [token for it in self.replies for token in it["output_ids"]]
        return {**last, "output_ids": ids, "text": "".join(it["text"] for it in self.replies)}

    def rest(self, agreed: int, preferred: Mapping[str, Any]) -> Any:
        """The request that goes on after the tokens that agree, and replies with these first."""
        asked = copy(self.obj)
        asked.text, asked.input_ids = None, [*self.prompt_ids, *self.tokens[:agreed]]
        asked.return_prompt_token_ids = False
        params = _with(asked.sampling_params, {ANSWERED: agreed}, mode="off", verify=False)
        most = {**preferred, **params}.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
        params["max_new_tokens"] = most if most is None else most - agreed
        asked.sampling_params = params
        return asked

    def shown(self, reply: Reply) -> Reply:
        if not self.obj.return_prompt_token_ids:
            return reply
        return {**reply, "prompt_token_ids": self.prompt_ids}

    def verified(self, reply: Reply, agreed: int, check: Mapping[str, Any]) -> Reply:
        """What the user sees of a reply; a full prefill would have found what the check found."""
        num = len(self.tokens)
        told = {name: value for name, value in self.told.items() if name != DRAFT_ENDS}
        verified = Verified(drafted=num, agreed=agreed, redone=num - agreed)
        told |= {"exact": True, "verified": msgspec.to_builtins(verified)}
        cached = {name: check[name] for name in _CACHED if name in check}
        return self.shown({**reply, "meta_info": {**reply["meta_info"], **cached, KEY: [told]}})

    def aborted(self, finish_reason: Mapping[str, Any]) -> Reply:
        """What was drafted is not sent."""
        last = self.replies[-1]
        ended = {"finish_reason": finish_reason, "completion_tokens": 0}
        reply = {**last, "output_ids": [], "meta_info": {**last["meta_info"], **ended}}
        return self.shown({**reply, "text": ""} if "text" in last else reply)


async def _check(manager: Any, draft: _Draft, http: Any) -> tuple[int, Mapping[str, Any]]:
    """How many of its tokens agree with exact KV, and the `meta_info` of that run; none where it
    failed. Raises ExactRunAborted, and what SGLang raises when the client is gone."""
    if not draft.tokens:
        return 0, {}
    try:
        distributions, meta = await exact_run(
            manager, draft.prompt_ids, draft.tokens, draft.obj, rid=draft.obj.rid, http=http
        )
    except (ValueError, HTTPException) as exc:
        if http is not None and await http.is_disconnected():
            raise
        log.warning("request %s: not checked, so it does a full prefill: %s", draft.obj.rid, exc)
        return 0, {}
    pairs = zip(draft.tokens, map(argmax, distributions), strict=True)
    return sum(1 for _ in takewhile(lambda it: it[0] == it[1], pairs)), meta


def _with(params: Any, beside: Mapping[str, int] = {}, /, **controls: Any) -> dict[str, Any]:
    """Sampling parameters with these controls, and this beside the user's controls."""
    params = params or {}
    custom = {**(params.get("custom_params") or {}), **beside}
    controls = {**custom.get("droidspeak", {}), **controls}
    return {**params, "custom_params": {**custom, "droidspeak": controls}}
