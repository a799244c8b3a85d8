"""Shadows: answers from approximate KV that are compared with an exact run afterwards.

    arrival  a request is chosen by a hash of its id under a key of this server's, so that nothing
             of it or of the load decides, and no user can. It asks SGLang for log-probabilities
             beside, and its user does not see them
    answer   if it reused another model's KV: its first tokens and their distributions are kept
    idle     while no request runs, an exact run of the same server says what full prefill would
             have said; one that comes meanwhile ends it, to be tried again. Without such a moment
             before the deadline the shadow is dropped
    verdict  the scheduler's half (`service`) hears how far apart the two are, and says of which
             plans every request is to be compared

What reads exact KV only has no shadow, nor has a request that something else decides than the
model's own distributions. Event loop of the front end only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cachetree.planning import PlanId
from sglang_droidspeak.engine import asking
from sglang_droidspeak.engine.asking import ANSWERED, SECRET
from sglang_droidspeak.guard.distance import POSITIONS, TOP, LogProbs, distance
from sglang_droidspeak.guard.plans import GuardQuestion, GuardState, Shadow
from sglang_droidspeak.request.controls import parse_controls
from sglang_droidspeak.request.meta_info import KEY

if TYPE_CHECKING:
    from sglang_droidspeak.start.config import Settings

log = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Answers whose prompts are kept until they are compared."""
_KEY: Final = SECRET.encode()
_LOOK_S: Final = 0.02
"""Between two looks whether a request runs."""
_TEMPERATURES: Final = (0.1, 1.0)
"""From log-probabilities at lower ones those at temperature 1 cannot be told: SGLang gives all but
the first few tokens none. At higher ones answers lead where no profile has looked."""

_KEPT: Final = (
    "lora_path",
    "extra_key",
    "cache_salt",
    "routing_key",
    "no_logs",
    "http_worker_ipc",
)
"""Of the user's request: its model, its tenant, and how it is treated."""

_NEUTRAL: Final[Mapping[str, float]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": 1,
    "ignore_eos": False,
}
"""Sampling parameters that otherwise change its distributions, as these do, or have it say more
than the model would, which no profile has measured;"""
_WITHOUT: Final = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark")
_UNASKED: Final = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "positional_embed_overrides",
    "session_params",
    "watermark",
    "custom_logit_processor",
    "max_thinking_tokens",
    "require_reasoning",
    "return_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)
"""and what else a request may bring or want that an exact run of it would not have."""

Reply = dict[str, Any]


class Shadows:
    def __init__(self, settings: Settings) -> None:
        self._rate: Final = settings.shadow_share
        self._deadline_s: Final = settings.shadow_deadline_s
        self._suspects: frozenset[PlanId] = frozenset()
        self._num_suspected = 0
        """Requests that were looked at for them since a shadow was last compared."""
        self._waiting: Final[deque[_Answer]] = deque()
        self._missed: Counter[str] = Counter()
        """Of which the scheduler has not heard."""
        self._task: asyncio.Task[None] | None = None

    def generate(self, original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        """Hooks TokenizerManager.generate_request, which returns an async generator."""
        temperature = _temperature(obj, manager)
        if temperature is None:
            return original(manager, obj, request)
        obj.normalize_batch_and_arguments()
        is_chosen = place_of(obj.rid) < self._rate
        if not is_chosen:
            if not self._may_suspect:
                return original(manager, obj, request)
            self._num_suspected += 1
        it = _Answer(_with_distributions(obj), obj.return_prompt_token_ids, is_chosen, temperature)
        return self._watched(manager, it, original(manager, it.asked, request))

    @property
    def _may_suspect(self) -> bool:
        """Suspicions lapse while nothing comes of them: not where no server is ever idle, nor where
        nobody uses those plans, is every request looked at."""
        num_vain = max(self._num_suspected, len(self._waiting))
        return bool(self._suspects) and num_vain < MAX_WAITING

    async def _watched(
        self, manager: Any, it: _Answer, replies: AsyncGenerator[Reply, None]
    ) -> AsyncGenerator[Reply, None]:
        async with aclosing(replies):
            async for reply in replies:
                is_delta = it.asked.stream and manager.incremental_streaming_output
                shown = it.shown(reply, is_delta=is_delta)
                finish = shown["meta_info"]["finish_reason"]
                if finish and finish["type"] != "abort":  # Nobody may ask for more.
                    self._keep(manager, it)
                yield shown

    def _keep(self, manager: Any, it: _Answer) -> None:
        plan = it.plan
        if plan is None or not (it.is_chosen or plan in self._suspects):
            return
        it.keep(time.monotonic() + self._deadline_s)
        self._waiting.append(it)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._missed["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(manager))

    async def _run(self, manager: Any) -> None:
        """Until none waits."""
        while self._waiting:
            try:
                await self._tell(manager, await _shadow(manager, self._waiting.popleft()))
            except Exception:
                log.exception("droidspeak: an answer was not compared with an exact run")
                self._missed["failed"] += 1

    async def _tell(self, manager: Any, shadow: Shadow | None) -> None:
        if shadow is None:
            self._missed["dropped"] += 1
        else:
            self._num_suspected = 0
        missed = self._missed.copy()
        question = msgspec.json.encode(GuardQuestion(shadow=shadow, missed=missed)).decode()
        told = await asking.ask(manager, asking.GUARD, question, KEY)
        self._missed -= missed
        self._suspects = frozenset(msgspec.convert(told, GuardState).suspects)


@dataclass(slots=True, eq=False)
class _Answer:
    """To a request that is looked at."""

    asked: Any
    """As SGLang is asked; it resolves the adapter."""
    shows_prompt: bool
    """The user wants its ids."""
    is_chosen: bool
    """By its id, whichever plan it reads by."""
    temperature: float
    prompt_ids: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    """The first ones of the answer,"""
    served: list[LogProbs] = field(default_factory=list)
    """and the distributions they are from."""
    told: Mapping[str, Any] = field(default_factory=dict)
    num_cached: int = 0
    """Tokens of the prompt that SGLang has read from a cache, those that were loaded too."""
    is_whole: bool = True
    """Every token of it came with its distribution."""
    deadline_s: float = 0.0
    """On monotonic time."""

    @property
    def plan(self) -> PlanId | None:
        """By which it reused another model's KV; None where it did not, or lacks what a comparison
        needs."""
        told = self.told
        if not (self.tokens and self.prompt_ids and self.is_whole):
            return None
        if told.get("outcome") != "reused" or told["exact"] or told["sender"] == told["receiver"]:
            return None
        if 2 * told["reused_tokens"] < self.num_cached:
            return None  # Most of it the device had, by whichever plan.
        block = told["block"] and tuple(told["block"])
        return PlanId(told["sender"], told["receiver"], block, told["e_corrected"])

    def shown(self, reply: Reply, *, is_delta: bool) -> Reply:
        """What the user sees of a reply."""
        meta = reply["meta_info"]
        self.told = (meta.get(KEY) or [self.told])[0]
        self.num_cached = meta.get("cached_tokens", self.num_cached)
        start = 0 if is_delta else len(self.tokens)
        tokens, tops = meta.get("output_token_logprobs", ()), meta.get("output_top_logprobs", ())
        self.is_whole &= len(tokens) == len(tops)
        new = zip(tokens[start:], tops[start:], strict=False)
        for (logprob, token, _), top in islice(new, POSITIONS - len(self.tokens)):
            self.tokens.append(token)
            self.served.append({**{it: value for value, it, _ in top}, token: logprob})
        self.prompt_ids = reply.get("prompt_token_ids") or self.prompt_ids
        shown = {name: it for name, it in meta.items() if "logprobs" not in name}
        reply = {**reply, "meta_info": shown}
        if not self.shows_prompt:
            reply.pop("prompt_token_ids", None)
        return reply

    def keep(self, deadline_s: float) -> None:
        """No more of it than its comparison needs, until then."""
        self.asked = copy(self.asked)
        self.asked.text = self.asked.input_ids = None
        self.prompt_ids = array("q", self.prompt_ids)
        self.deadline_s = deadline_s


def _with_distributions(obj: Any) -> Any:
    """The user's request, asking for them too."""
    asked = copy(obj)
    asked.return_logprob, asked.top_logprobs_num = True, TOP
    # What SGLang heeds only now that it returns some.
    asked.logprob_start_len, asked.token_ids_logprob = -1, None
    asked.return_text_in_logprobs = False
    asked.return_flat_raw_top_logprobs = asked.return_flat_raw_output_top_logprobs = False
    asked.return_flat_raw_top_logprobs_b64 = False
    asked.return_prompt_token_ids = True
    return asked


async def _shadow(manager: Any, it: _Answer) -> Shadow | None:
    """Once no request runs: an exact run makes way for one that comes, and is tried again. None
    where there is no such moment in time, or the adapter is not there any more."""
    while True:
        while manager.rid_to_state:
            if time.monotonic() >= it.deadline_s:
                return None
            await asyncio.sleep(_LOOK_S)
        if not _is_loaded(manager, it.asked):
            return None
        run = asyncio.create_task(_exact_run(manager, it.prompt_ids, it.tokens, it.asked))
        try:
            while not run.done() and len(manager.rid_to_state) <= 1:
                await asyncio.wait([run], timeout=_LOOK_S)
            if run.done():
                return Shadow(plan=it.plan, tv=distance(it.served, run.result(), it.temperature))
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


async def _exact_run(
    manager: Any, prompt_ids: Sequence[int], served_ids: Sequence[int], like: Any
) -> Sequence[LogProbs]:
    """What full prefill would have said: the exact distribution at the position of each served
    token.

    It is a request like any other to SGLang's TokenizerManager: the prompt and the served tokens as
    its input, nothing generated. It reads and leaves exact KV only, in the tenant of the user's
    GenerateReqInput `like`: what approximate KV has given nobody finds there, and what it leaves,
    later requests with that prompt find in place of the approximate KV. No metric and no
    explanation of droidspeak's counts it. Cancelled, it aborts its request; raises RuntimeError
    where somebody else has, or other weights have the name of those of `like` by now, and what
    SGLang raises of a request that it refuses.
    """
    asked = type(like)(
        input_ids=[*prompt_ids, *served_ids],
        rid=f"droidspeak-{uuid.uuid4().hex}",
        sampling_params={
            "temperature": 0,
            "max_new_tokens": 0,
            "custom_params": {"droidspeak": {"mode": "off"}, ANSWERED: len(served_ids)},
        },
        return_logprob=True,
        # The first position from there has no log-probability.
        logprob_start_len=len(prompt_ids) - 1,
        top_logprobs_num=TOP,
        log_metrics=False,
        **{name: getattr(like, name) for name in _KEPT},
    )
    async with aclosing(manager.generate_request(asked, None)) as replies:
        meta: Mapping[str, Any] = (await anext(replies))["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise RuntimeError(f"the exact run was aborted: {meta['finish_reason']}")
    if asked.lora_id != like.lora_id or meta[KEY][0]["outcome"] != "off":
        raise RuntimeError("the weights that gave the answer were replaced before the exact run")
    served = meta["input_token_logprobs"][1:]
    tops = meta["input_top_logprobs"][1:]
    return [
        {token: logprob for logprob, token, _ in (*top, one)}
        for one, top in zip(served, tops, strict=True)
    ]


def _is_loaded(manager: Any, asked: Any) -> bool:
    """Whether its adapter is the one that it was: SGLang loads one again that is asked for by the
    name that it had."""
    if not asked.lora_path:
        return True
    ref = manager.lora_registry.get_all_adapters().get(asked.lora_path)
    return ref is not None and ref.lora_id == asked.lora_id


def place_of(rid: str) -> float:
    """Of a request among all ids, 0 to 1; those below the rate are chosen."""
    place = blake2b(rid.encode(), digest_size=8, key=_KEY).digest()
    return int.from_bytes(place, "big") / 2**64


def _temperature(obj: Any, manager: Any) -> float | None:
    """Of the log-probabilities that SGLang reports of a request that may have a shadow: a
    GenerateReqInput for one answer, with what the server of this TokenizerManager prefers. None of
    others."""
    if not hasattr(obj, "return_logprob"):
        return None  # An embedding.
    if not isinstance(obj.text, str) and not (obj.input_ids and isinstance(obj.input_ids[0], int)):
        return None
    params = {**(manager.preferred_sampling_params or {}), **(obj.sampling_params or {})}
    is_neutral = all(params.get(name) in (None, value) for name, value in _NEUTRAL.items())
    is_free = not any(params.get(name) for name in _WITHOUT)
    if not (is_neutral and is_free) or any(getattr(obj, it) for it in _UNASKED):
        return None
    if params.get("top_k") == 1 and params.get("temperature", 1) not in (0, 1):
        return None  # Greedy, and its log-probabilities are not.
    asked, (least, most) = params.get("temperature") or 1.0, _TEMPERATURES
    if not (isinstance(asked, int | float) and 0 < asked <= most):
        return None
    is_original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
    reported = 1.0 if is_original else asked
    if reported < least or not _may_reuse(params.get("custom_params") or {}):
        return None
    return reported


def _may_reuse(custom: Any) -> bool:
    if not isinstance(custom, dict) or ANSWERED in custom:
        return False
    try:
        return parse_controls(custom).mode != "off"
    except ValueError:  # Of which the scheduler says what.
        return False
