"""Shadows: compare answers from approximate KV with exact prefills afterwards.

    arrival  A hash of the request's id, under a key of this server, chooses the requests to
             compare. So text, the machine's load and users cannot influence the choice. While a
             plan is suspected, or if pairs may inherit a plan, all requests are watched.
    answer   If the request reused another model's KV, its prompt is kept.
    turn     The server asks itself twice. The greedy request decodes over the same approximate KV.
             The exact request prefills the prompt and these tokens. Each waits until the server is
             idle, or until the budget allows it beside users' requests (`Budget`).
    verdict  The scheduler's half (`service`) gets the distance between both. It answers with the
             plans for which every request must be compared.

Why two requests, and not the user's answer? Profiles have measured greedy answers, and SGLang
samples by default. A sampled answer leads into text that no profile has measured. With two requests
every answer can be compared, and is never touched.

Runs only on the event loop of the front end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cachetree import ModelId
from cachetree.planning import PlanId
from sglang_droidspeak.engine import asking
from sglang_droidspeak.engine.asking import ANSWERED, SECRET
from sglang_droidspeak.guard.plans import (
    HOUR_S,
    POSITIONS,
    TOP,
    GuardQuestion,
    GuardState,
    LogProbs,
    Shadow,
    distance,
)
from sglang_droidspeak.request.meta_info import KEY

if TYPE_CHECKING:
    from sglang_droidspeak.start.config import Settings

log = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Largest number of answers that wait for their comparison."""
_KEY: Final = SECRET.encode()
_LOOK_S: Final = 0.02
"""Seconds between two checks whether the server is idle."""
_MOST_CREDIT_S: Final = 10.0
_MODEL_AND_TENANT: Final = (
    "lora_path",
    "extra_key",
    "cache_salt",
    "routing_key",
    "no_logs",
    "http_worker_ipc",
)
"""Fields of the user's request that both requests of its comparison copy."""

Reply = dict[str, Any]


class Shadows:
    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate: Final = settings.shadow_share
        self._deadline_s: Final = settings.shadow_deadline_s
        self._clock: Final = clock
        self._budget: Final = Budget(settings.shadow_busy_share, clock)
        self._suspects: frozenset[PlanId] = frozenset()
        self._known: frozenset[tuple[ModelId, ModelId]] | None = (
            frozenset() if settings.lines else None
        )
        """Pairs in the scheduler's last answer. Another pair may have inherited a plan since, so
        all its answers are compared. None if no pair can inherit a plan."""
        self._waiting: Final[deque[_Answer]] = deque()
        self._missed: Counter[str] = Counter()
        """Number of comparisons without a result, for each cause, that the scheduler does not
        know."""
        self._task: asyncio.Task[None] | None = None

    def generate(self, original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        """Hook around TokenizerManager.generate_request. Return its async generator of replies."""
        if not _is_comparable(obj):
            return original(manager, obj, request)
        obj.normalize_batch_and_arguments()
        is_chosen = place_of(obj.rid) < self._rate
        if not (is_chosen or self._suspects or self._known is not None):
            return original(manager, obj, request)
        asked = copy(obj)
        asked.return_prompt_token_ids = True
        answer = _Answer(asked, shows_prompt=obj.return_prompt_token_ids, is_chosen=is_chosen)
        return self._watched(manager, answer, original(manager, asked, request))

    async def _watched(
        self, manager: Any, answer: _Answer, replies: AsyncGenerator[Reply, None]
    ) -> AsyncGenerator[Reply, None]:
        async with aclosing(replies):
            async for reply in replies:
                shown = answer.shown(reply)
                finish = shown["meta_info"]["finish_reason"]
                if finish and finish["type"] != "abort":  # The client may ask for no more replies.
                    self._keep(manager, answer)
                yield shown

    def _keep(self, manager: Any, answer: _Answer) -> None:
        plan = answer.plan
        if plan is None:
            return
        is_new = self._known is not None and (plan.sender, plan.receiver) not in self._known
        if not (answer.is_chosen or is_new or plan in self._suspects):
            return
        answer.keep(self._clock() + self._deadline_s)
        self._waiting.append(answer)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._missed["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(manager))

    async def _run(self, manager: Any) -> None:
        """Compare the waiting answers, one after another, until none is left."""
        while self._waiting:
            try:
                await self._tell(manager, await self._shadow(manager, self._waiting.popleft()))
            except Exception:
                log.exception("droidspeak: an answer was not compared with an exact run")
                self._missed["failed"] += 1

    async def _shadow(self, manager: Any, answer: _Answer) -> Shadow | None:
        """Send an answer's greedy and exact request, and compare them. None if one of them could
        not begin before the deadline, or if the KV was evicted."""
        served = await self._turn(manager, answer, lambda: _greedy_run(manager, answer))
        if not served:
            return None
        ids = [token for token, _ in served]
        exact = await self._turn(manager, answer, lambda: _exact_run(manager, answer, ids))
        if exact is None:
            return None
        tv = distance([probs for _, probs in served], exact)
        hour = int(time.time() // HOUR_S)
        return Shadow(plan=answer.plan, tv=tv, document=answer.document, hour=hour)

    async def _turn(
        self, manager: Any, answer: _Answer, start: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Wait until the server is idle or the budget has credit. Return the result of `start`.

        If there was no credit and another request arrives, cancel what `start` began, and start it
        again later. None if the deadline passes before a start, or if the adapter was unloaded.
        """
        budget = self._budget
        while True:
            while manager.rid_to_state and not budget.has_credit():
                if self._clock() >= answer.deadline_s:
                    return None
                await asyncio.sleep(_LOOK_S)
            if not _is_loaded(manager, answer.asked):
                return None
            run = asyncio.create_task(start())
            began_s, is_paid = self._clock(), budget.has_credit()
            try:
                while not run.done() and (is_paid or len(manager.rid_to_state) <= 1):
                    await asyncio.wait([run], timeout=_LOOK_S)
                    if len(manager.rid_to_state) > 1:
                        budget.charge(self._clock() - began_s)
                    began_s = self._clock()
                if run.done():
                    return run.result()
            finally:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)

    async def _tell(self, manager: Any, shadow: Shadow | None) -> None:
        if shadow is None:
            self._missed["dropped"] += 1
        missed = self._missed.copy()
        question = msgspec.json.encode(GuardQuestion(shadow=shadow, missed=missed)).decode()
        state = await asking.ask(manager, asking.GUARD, question, KEY)
        self._missed -= missed
        guard_state = msgspec.convert(state, GuardState)
        self._suspects = frozenset(guard_state.suspects)
        if self._known is not None:
            self._known = frozenset((it.sender, it.receiver) for it in guard_state.pairs)


class Budget:
    """Budget of seconds for comparisons beside users' requests: a share of all time, plus at most
    one request of a comparison.

    Such a request is charged for all the time that it shares with another request.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share: Final = share
        self._clock: Final = clock
        self._credit_s = 0.0
        self._seen_s = clock()

    def has_credit(self) -> bool:
        now = self._clock()
        earned_s = self._share * (now - self._seen_s)
        self._credit_s, self._seen_s = min(_MOST_CREDIT_S, self._credit_s + earned_s), now
        return self._credit_s > 0

    def charge(self, seconds: float) -> None:
        self._credit_s -= seconds


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that may be compared with an exact prefill."""

    asked: Any
    """The user's request as SGLang's own object, in which SGLang resolves the adapter."""
    shows_prompt: bool
    """Whether the user asked for the prompt's ids."""
    is_chosen: bool
    """Whether the hash of the request's id chose this answer for comparison."""
    prompt_ids: Sequence[int] = ()
    label: Mapping[str, Any] = field(default_factory=dict)
    num_cached: int = 0
    """Number of the prompt's tokens that SGLang has read from a cache, loaded tokens included."""
    deadline_s: float = 0.0
    """Latest time at which a request of the comparison may start, on the clock of `Shadows`."""

    @property
    def plan(self) -> PlanId | None:
        """Plan by which the request reused another model's KV. None: nothing to compare."""
        label = self.label
        if not self.prompt_ids or label.get("outcome") != "reused":
            return None
        if label["exact"] or label["sender"] == label["receiver"]:
            return None
        if 2 * label["reused_tokens"] < self.num_cached:
            return None  # The device had most of the KV already, perhaps by another plan.
        return plan_of(label)

    @property
    def document(self) -> str:
        """Digest of the prompt's tokens with KV from a cache."""
        read = array("q", self.prompt_ids[: self.num_cached])
        return blake2b(read.tobytes(), digest_size=8).hexdigest()

    def shown(self, reply: Reply) -> Reply:
        """Note the reply's label and prompt, and return the reply as the user sees it."""
        meta = reply["meta_info"]
        self.label = (meta.get(KEY) or [self.label])[0]
        self.num_cached = meta.get("cached_tokens", self.num_cached)
        self.prompt_ids = reply.get("prompt_token_ids") or self.prompt_ids
        if self.shows_prompt:
            return reply
        return {name: value for name, value in reply.items() if name != "prompt_token_ids"}

    def keep(self, deadline_s: float) -> None:
        """Drop what a comparison does not need, and set the deadline."""
        self.asked = copy(self.asked)
        self.asked.text = self.asked.input_ids = None
        self.prompt_ids = array("q", self.prompt_ids)
        self.deadline_s = deadline_s


def plan_of(label: Mapping[str, Any]) -> PlanId:
    """Return the plan that a response's label names."""
    block = label["block"] and tuple(label["block"])
    return PlanId(label["sender"], label["receiver"], block, label["e_corrected"])


async def _greedy_run(manager: Any, answer: _Answer) -> Sequence[tuple[int, LogProbs]] | None:
    """Decode greedily over the same approximate KV. Return the first tokens, each with its
    distribution.

    None if the KV was evicted, or its plan was taken out of service.
    """
    custom = (answer.asked.sampling_params or {}).get("custom_params") or {}
    controls = {KEY: custom[KEY]} if KEY in custom else {}
    meta = await _ask(
        manager, answer, answer.prompt_ids, answered=0, max_new=POSITIONS, controls=controls
    )
    label = meta[KEY][0]
    is_same = (
        plan_of(label) == answer.plan
        if label["outcome"] == "reused"
        else meta["cached_tokens"] >= answer.num_cached
    )
    if label["exact"] or not is_same:
        return None
    tops = meta["output_top_logprobs"]
    return [
        (token, _probs(top, (logprob, token)))
        for (logprob, token, _), top in zip(meta["output_token_logprobs"], tops, strict=True)
    ]


async def _exact_run(
    manager: Any, answer: _Answer, served_ids: Sequence[int]
) -> Sequence[LogProbs]:
    """Return the distribution that full prefill has at the position of each served token.

    The request prefills the prompt and the served tokens, and decodes nothing. It reads and inserts
    exact KV only, in the user's tenant. Later requests with this prompt find the exact KV instead
    of the approximate KV.
    """
    meta = await _ask(
        manager,
        answer,
        [*answer.prompt_ids, *served_ids],
        answered=len(served_ids),
        max_new=0,
        controls={KEY: {"mode": "off"}},
    )
    if meta[KEY][0]["outcome"] != "off":
        raise RuntimeError("the weights that gave the answer were replaced before the exact run")
    served, tops = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
    return [_probs(top, one[:2]) for one, top in zip(served, tops, strict=True)]


async def _ask(
    manager: Any,
    answer: _Answer,
    input_ids: Sequence[int],
    *,
    answered: int,
    max_new: int,
    controls: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Send a request of the server's own, for the model and tenant of the answer. Returns its
    `meta_info`.

    No metric or explanation of droidspeak counts the request. If this task is cancelled, it aborts
    the request. Raises RuntimeError if the request was aborted, or if the adapter's name has other
    weights by now. Raises SGLang's own errors for a request that SGLang refuses.
    """
    like = answer.asked
    asked = type(like)(
        input_ids=[*input_ids],
        rid=f"droidspeak-{uuid.uuid4().hex}",
        sampling_params={
            "temperature": 0,
            "max_new_tokens": max_new,
            "custom_params": {**controls, ANSWERED: answered},
        },
        return_logprob=True,
        # Only an answer's positions are needed. The prompt's first one has no log-probability.
        logprob_start_len=len(input_ids) - answered - 1 if answered else -1,
        top_logprobs_num=TOP,
        log_metrics=False,
        **{name: getattr(like, name) for name in _MODEL_AND_TENANT},
    )
    async with aclosing(manager.generate_request(asked, None)) as replies:
        meta: Mapping[str, Any] = (await anext(replies))["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise RuntimeError(f"the run was aborted: {meta['finish_reason']}")
    if asked.lora_id != like.lora_id:
        raise RuntimeError("the weights that gave the answer were replaced before the exact run")
    return meta


def _probs(top: Sequence[Any], one: tuple[float, int]) -> LogProbs:
    return {token: logprob for logprob, token in (*((it[0], it[1]) for it in top), one)}


def _is_loaded(manager: Any, asked: Any) -> bool:
    """Whether the answer's adapter is still loaded. If not, SGLang would load an adapter of the
    same name, perhaps with other content."""
    if not asked.lora_path:
        return True
    ref = manager.lora_registry.get_all_adapters().get(asked.lora_path)
    return ref is not None and ref.lora_id == asked.lora_id


def place_of(rid: str) -> float:
    """Hash a request's id to a number from 0 to 1. A request below `shadow_share` is compared."""
    place = blake2b(rid.encode(), digest_size=8, key=_KEY).digest()
    return int.from_bytes(place, "big") / 2**64


def _is_comparable(obj: Any) -> bool:
    """Whether a request is a user's GenerateReqInput, with one prompt and for one answer."""
    if not hasattr(obj, "return_logprob"):
        return False  # An embedding request.
    if not isinstance(obj.text, str) and not (obj.input_ids and isinstance(obj.input_ids[0], int)):
        return False
    params = obj.sampling_params or {}
    custom = params.get("custom_params") or {}
    return params.get("n", 1) == 1 and isinstance(custom, dict) and ANSWERED not in custom
