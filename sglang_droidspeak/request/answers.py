"""Answer an operator's questions about a running server: its peers, and one request or prompt.

No answer contains a token or a page hash of a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Final

import msgspec

from cachetree import LOCAL, Cache, ModelId, Span
from cachetree.metrics import Health, health_of
from cachetree.planning import Match, PairProfile, Plan, Profiles, Reason, Weighed, weigh
from cachetree.transport import Source
from sglang_droidspeak.engine import asking, prefixes
from sglang_droidspeak.engine.names import LoRARef, Scheduler
from sglang_droidspeak.metrics import Saving
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance, outcome_of
from sglang_droidspeak.request.outcomes import advice_on
from sglang_droidspeak.request.planner import Planned, Planner, Price
from sglang_droidspeak.request.report import Label, Labels

log = logging.getLogger(__name__)

_USUAL_TOKENS: Final = 2048
_OFF: Final = {
    "reading_weights": "weights were updated, and are being read; wait",
    "weights_updated": (
        "weights are being updated, or it is not known what an update has written; end it, or "
        "update from a checkpoint folder"
    ),
    "loader_failed": "the loader's thread has failed; restart the server",
}


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question about a request that was answered, or about a prompt that was not sent."""

    request_id: str | None = None
    input_ids: list[int] = []
    adapter: str | None = None
    """Name of the adapter, as requests write it."""
    extra_key: str | None = None
    cache_salt: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation why a request was or was not served from another model's cache. Numbers of pages
    count whole pages from the prompt's start."""

    outcome: str
    detail: str | None
    cause: str
    remedy: str
    prompt_tokens: int
    page_tokens: int
    model: ModelId | None = None
    device_pages: int | None = None
    """Number of pages on the device when the request was planned. None if not looked up."""
    holdings: Sequence[Match] = ()
    full_prefill_s: float | None = None
    """Predicted seconds to prefill the tokens that the device lacks."""
    ways: Sequence[Weighed] = ()
    profile_command: str = ""
    """Command that makes the missing profile. It contains the paths that this server knows. Empty
    if no profile is missing."""
    approximate: Mapping[ModelId, int] = {}
    """Number of pages of an unsent prompt that each other model of this server has only as
    approximate KV. A model reads no approximate KV of another model."""
    heirs: Mapping[ModelId, str] = {}
    """State (`Pair.heir`) of each sender's pair that may inherit a plan. Keys are senders."""
    measured: RequestProvenance | None = None
    """Origin of the request's KV, with times. None for a prompt that was not sent."""


def explained(label: Label, page_tokens: int, profiles: Profiles) -> Explanation:
    """Explain a request: repeat the choice of its plan, from the inputs in its label and from the
    present `profiles`. The drift guard may have changed them since the request. Pure."""
    seen, advice = label.considered, advice_on(label.provenance.outcome)
    demand = None if seen is None else seen.demand
    return Explanation(
        outcome=label.provenance.outcome,
        detail=label.provenance.detail,
        cause=advice.cause,
        remedy=advice.remedy,
        prompt_tokens=label.num_tokens,
        page_tokens=page_tokens,
        model=demand and demand.receiver,
        device_pages=demand and demand.num_held,
        holdings=seen.matches if seen else (),
        full_prefill_s=seen and seen.full_prefill_s,
        ways=weigh(seen, profiles) if seen else (),
        measured=label.provenance if label.is_answered else None,
    )


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A pair with a profile on this server, as `/server_info` shows it."""

    sender: ModelId
    receiver: ModelId
    usable: bool
    failed: bool
    """Whether the profile did not pass its gate. False if only the drift guard has taken the pair
    out of service."""
    reason: str
    block: tuple[int, int] | None
    """Recommended block. Null if no block is recommended."""
    price: Price | None
    """Predicted cost of the recommended block, for a prompt of 2,048 tokens."""
    heir: str | None
    """State of a pair that may inherit a line's plan: `probation`, `in_service`, `out_of_service`
    or `too_far`. Null for a pair with a profile of its own."""
    measured_tokens: int | None
    """Longest prefix that the profile covers. Null if it covers every length."""


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `/server_info` about this extension."""

    peers: Sequence[Source]
    links: Mapping[str, float]
    """Recently measured bytes per second from each peer."""
    pairs: Sequence[Pair]
    savings: Sequence[Saving]
    health: Health
    off: str
    """Reason why the server reuses nothing, with the remedy. Empty if it reuses."""


@dataclass(eq=False)
class Answers:
    """Answers to operators' questions: `/server_info` and this extension's HTTP pages. Scheduler
    thread only."""

    _cache: Cache
    _planner: Planner
    _labels: Labels
    _lora_refs: Mapping[str, LoRARef]
    _page_size: int
    _guard: Callable[[str], dict[str, Any]]
    """Function that returns the drift guard's answer to a JSON question. May raise MsgspecError or
    LookupError."""

    def add(self, output: Any, scheduler: Scheduler, recv_req: Any) -> None:
        """Hooks Scheduler.get_internal_state: add this extension's state to SGLang's answer. If one
        of this extension's HTTP pages asks, replace SGLang's answer."""
        page, asked = asking.asked(recv_req)
        answer = self._answer(page, asked, scheduler)
        if page:
            output.internal_state = {KEY: answer}
        else:
            output.internal_state[KEY] = answer

    def _state(self) -> ServerState:
        status = self._cache.status()
        return ServerState(
            peers=self._cache.sources(),
            links={it.address: it.bytes_per_s for it in status.peers if it.bytes_per_s},
            pairs=[self._pair(it) for it in self._planner.profiles.values()],
            savings=[*self._labels.metrics.savings.values()],
            health=health_of(status),
            off=self._off,
        )

    @property
    def _off(self) -> str:
        return _OFF.get(self._planner.why_off, "")

    def _pair(self, profile: PairProfile) -> Pair:
        sender, receiver = profile.sender.model_id, profile.receiver.model_id
        best, plan, off = profile.recommended, None, self._off
        if best is not None:
            plan = Plan(
                sender=sender,
                receiver=receiver,
                location=LOCAL,
                pages=Span(0, max(1, _USUAL_TOKENS // self._page_size)),
                block=best.block,
                num_layers=profile.receiver.num_layers,
            )
        return Pair(
            sender=sender,
            receiver=receiver,
            usable=profile.is_usable and not off,
            failed=(sender, receiver) in self._planner.failed,
            reason=off or profile.reason,
            block=None if best is None else (best.start, best.stop),
            price=None if plan is None else self._planner.price(plan),
            heir=self._planner.heirs.get((sender, receiver)),
            measured_tokens=None if profile.lossless else profile.measured_tokens,
        )

    def _answer(self, page: str, asked: str, scheduler: Scheduler) -> dict[str, Any]:
        try:
            names = {"names": {**self._cache.names.now}}
            if not page:
                return msgspec.to_builtins(self._state()) | names
            if page == asking.GUARD:
                return self._guard(asked) | {"off": self._off} | names
            question = msgspec.json.decode(asked, type=Question)
            return msgspec.to_builtins(self._explain(question, scheduler), str_keys=True) | names
        except (msgspec.MsgspecError, LookupError) as exc:
            return {"error": str(exc.args[0])}
        except Exception as exc:
            log.exception("an operator's question was not answered")
            return {"error": f"{type(exc).__name__}: {exc}; the server's log has more"}

    def _explain(self, question: Question, scheduler: Scheduler) -> Explanation:
        answered, asked = self._labels.answered, question.request_id
        if asked is not None and asked not in answered:
            raise LookupError(
                f"no request {asked!r} among the last {len(answered)} that this server has answered"
            )
        if asked is not None:
            label, approximate = answered[asked], {}
        else:
            label, approximate = (
                self._unsent(question, scheduler),
                self._others(question, scheduler),
            )
        explanation = explained(label, self._page_size, self._planner.profiles)
        missing = (way.sender for way in explanation.ways if way.reason == Reason.NO_PROFILE.value)
        command = "".join(
            self._profile_command(it, explanation.model, scheduler) for it in [*missing][:1]
        )
        model = explanation.model
        heirs = {of: it for (of, to), it in self._planner.heirs.items() if to == model}
        return msgspec.structs.replace(
            explanation, profile_command=command, approximate=approximate, heirs=heirs
        )

    def _profile_command(
        self, sender: ModelId, receiver: ModelId | None, scheduler: Scheduler
    ) -> str:
        """Return the command that profiles a pair. A placeholder stands for each path that this
        server does not know."""
        base = scheduler.server_args.model_path
        paths = {
            self._planner.model_of(lora_id): (base, it.lora_path)
            for lora_id, it in self._lora_refs.items()
        }
        paths[self._planner.model_of(None)] = (base,)
        names, words = self._cache.names.now, ["droidspeak profile"]
        for role, model in (("sender", sender), ("receiver", receiver)):
            path, *lora = paths.get(model, (f"PATH_OF_{names.get(model, model)}",))
            words += [f"--{role} {quote(path)}", *(f"--{role}-lora {quote(it)}" for it in lora)]
        return " ".join((*words, "--data DATA.jsonl --out PROFILE.json"))

    def _others(self, question: Question, scheduler: Scheduler) -> dict[ModelId, int]:
        """Return how many pages of a prompt each other model of this server has only as approximate
        KV."""
        approximate: dict[ModelId, int] = {}
        asked = self._lora_id(question.adapter)
        for lora_id in {None, *self._lora_refs} - {asked}:
            model = self._planner.model_of(lora_id)
            req = asking.unsent(
                question.input_ids, lora_id, question.extra_key, question.cache_salt
            )
            if model is None or self._planner.refusal(req):
                continue
            req.refresh_fill_ids()
            self._planner.meet(req)
            held = self._planner.held(req, scheduler.tree_cache)
            if held.approximate > held.exact:
                approximate[model] = held.approximate
        return approximate

    def _unsent(self, question: Question, scheduler: Scheduler) -> Label:
        """Return the label that an unsent prompt would get if it were sent now."""
        if not question.input_ids:
            raise LookupError("there is no request_id, and no prompt in input_ids")
        lora_id = self._lora_id(question.adapter)
        req = asking.unsent(question.input_ids, lora_id, question.extra_key, question.cache_salt)
        if refusal := self._planner.refusal(req):
            return Label(RequestProvenance(outcome=refusal), len(question.input_ids))
        req.refresh_fill_ids()
        self._planner.meet(req)
        pages = prefixes.reusable_pages(req, self._page_size)
        num_waiting = len(scheduler.waiting_queue)
        planned = self._planner.plan(req, pages, scheduler.tree_cache, num_waiting)
        if isinstance(planned, Planned):
            outcome = RequestProvenance(outcome=outcome_of(planned.plan))
        else:
            outcome = RequestProvenance(outcome=planned.outcome, detail=planned.detail or None)
        return Label(outcome, len(question.input_ids), planned.considered)

    def _lora_id(self, name: str | None) -> str | None:
        by_name = {None: None} | {it.lora_name: key for key, it in self._lora_refs.items()}
        if name not in by_name:
            raise LookupError(f"this server has no adapter {name!r} now")
        return by_name[name]
