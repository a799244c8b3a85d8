"""What each request is answered with, in `meta_info`, in the log and in the metrics: once. And what
becomes of it meanwhile, as slices of SGLang's trace of it.

match      from its first sight until it was planned, or declined
fetch_e    from the start of its fetch until all E that its plan needs was in host memory
fetch_kv   and from there until all KV was
wait       from its plan until it was admitted, or the plan given up
recompute  the partial prefill of its batch
load       from the first copy into its slots to the last, beside the recompute and the forward
fallback   the full prefill in place of what did not come; a moment where the queue gave it up

A server without `--enable-trace` does nothing for slices. Scheduler thread only.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cachetree import Kind, ModelNames, printable, with_names
from cachetree.planning import Considered
from sglang_droidspeak.engine import asking, prefixes, tracing
from sglang_droidspeak.engine.names import FINISH_ABORT, Req, is_health_check_generate_req
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.controls import name_of
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance
from sglang_droidspeak.request.request import Request

log = logging.getLogger("droidspeak.request")

_LABEL: Final = "droidspeak_label"
_MAX_WARMED: Final = 256
"""Prompts with `n` above 1 that are answered at the same time."""
MAX_TOLD: Final = 1000
"""Requests that can still be explained, where their ids are no longer than"""
MAX_ID: Final = 256
"""so many characters,"""
MAX_MATCHES: Final = 32_000
"""or fewer, where each had so many models to read from."""


@dataclass(slots=True, eq=False)
class Label:
    """What is known of a request, and kept of it once it was answered: no token of it."""

    provenance: RequestProvenance
    num_tokens: int = 0
    """Of the prompt, once it was answered."""
    considered: Considered | None = None
    """What its plan, or that there is none, was chosen from; None where there was no choice."""
    is_told: bool = False
    """Its request was answered: nothing of it changes any more."""

    @property
    def num_matches(self) -> int:
        return len(self.considered.matches) if self.considered is not None else 0


class Labels:
    """What becomes of each request: noted as it goes, told and counted once.

    A label is made of what the request has read, when SGLang first reports an answer of it. What
    happens to the request later, its retraction too, changes nothing. Scheduler thread only.
    """

    def __init__(self, metrics: Metrics, names: ModelNames) -> None:
        self.metrics: Final = metrics
        self._names: Final = names
        self.told: Final[OrderedDict[str, Label]] = OrderedDict()
        """By request id, the latest last."""
        self._num_matches = 0
        self._warmed: Final[OrderedDict[int, RequestProvenance]] = OrderedDict()
        """By prompt and controls: what SGLang's own request has read before the samples of `n`
        above 1."""

    def note(self, req: Req, provenance: RequestProvenance) -> None:
        """What is known so far; the last word counts, and none once the request has its label."""
        label = _label_of(req)
        if not label.is_told:
            label.provenance = provenance
            _trace(req, provenance)

    def report(self, reqs: Sequence[Req], skip_req: Req | None = None) -> None:
        """Before SGLang sends what is new of these.

        `skip_req` has not been prefilled to its end; what was retracted meanwhile will be again.
        """
        # Of a batch that decodes all are told: this is all that it costs.
        for req in [req for req in reqs if not _label_of(req).is_told]:
            if not (req is skip_req or req.is_retracted):
                ended = req.finished_reason or req.to_finish
                self._tell(req, is_aborted=isinstance(ended, FINISH_ABORT))

    def aborted(self, _scheduler: object, _abort: object, req: Req) -> None:
        """Before SGLang says that a request is over which was in no batch, or not to its end; hooks
        Scheduler.send_abort_output."""
        self._tell(req, is_aborted=True)

    def _tell(self, req: Req, *, is_aborted: bool) -> None:
        label, params = _label_of(req), req.sampling_params
        if label.is_told:
            return
        label.is_told = True
        if is_health_check_generate_req(req):
            return
        # Where nothing was read it is exact, too; who is in the queue has read nothing yet.
        is_admitted, told = req.extend_end is not None, label.provenance
        is_exact = told.exact and not (is_admitted and prefixes.is_approximate(req))
        num_approximate = 0 if is_exact else prefixes.num_approximate(req)
        read = {"exact": is_exact, "approximate_tokens": num_approximate}
        told = label.provenance = msgspec.structs.replace(told, **read)
        if is_aborted and not told.reused_tokens:
            told = RequestProvenance(outcome="aborted", **read)
        elif params.n > 1:
            if params.max_new_tokens == 0:
                self._warmed[_prompt(req)] = told
                if len(self._warmed) > _MAX_WARMED:
                    self._warmed.popitem(last=False)
                return
            warmed = self._warmed.get(_prompt(req), told)
            # Exact where that was not: it has not read what was reused.
            has_read = told.reused_tokens or told.outcome.startswith("fallback")
            if not has_read and warmed.exact == is_exact:
                told = warmed
        if prefixes.is_not_invoked(req):
            told = msgspec.structs.replace(told, not_invoked=True)
        names = self._names.now
        told = msgspec.structs.replace(
            told,
            sender_name=names.get(told.sender or ""),
            detail=told.detail and with_names(told.detail, names),
        )
        label.provenance, label.num_tokens = told, len(req.origin_input_ids)
        if not asking.is_own(req):
            if told.not_invoked:
                self.metrics.not_invoked.inc()
            num_approximate = 0 if is_aborted else told.approximate_tokens
            outcome = "aborted" if is_aborted else told.outcome
            self.metrics.count_outcome(
                outcome, exact=told.exact or is_aborted, num_approximate=num_approximate
            )
            self._keep(req.rid, label)
            _write(req.rid, told)
        req.customized_info = {**(req.customized_info or {}), KEY: [msgspec.to_builtins(told)]}

    def _keep(self, rid: str, label: Label) -> None:
        if len(rid) > MAX_ID:
            return
        replaced = self.told.pop(rid, None)
        self.told[rid] = label
        self._num_matches += label.num_matches - (replaced.num_matches if replaced else 0)
        while len(self.told) > MAX_TOLD or self._num_matches > MAX_MATCHES:
            self._num_matches -= self.told.popitem(last=False)[1].num_matches


def _label_of(req: Req) -> Label:
    label: Label | None = getattr(req, _LABEL, None)
    if label is None:
        label = Label(RequestProvenance(outcome="error"))
        setattr(req, _LABEL, label)
    return label


def must_stay_exact(req: Req) -> bool:
    """Whether it was told to be exact, and retracted since."""
    label = _label_of(req)
    return label.is_told and label.provenance.exact


def consider(req: Req, considered: Considered | None) -> None:
    """What its plan, or that there is none, was chosen from; as for `Labels.note`."""
    label = _label_of(req)
    if not label.is_told:
        label.considered = considered


def _prompt(req: Req) -> int:
    tokens, custom = req.origin_input_ids.tobytes(), req.sampling_params.custom_params
    controls = repr(custom.get(KEY)) if isinstance(custom, dict) else None
    return hash((tokens, controls, req.lora_id, prefixes.tenant_of(req), req.cache_salt))


def _write(rid: str, provenance: RequestProvenance) -> None:
    """A reuse that became a full prefill is worth a line at INFO; the others are one at DEBUG."""
    level = logging.INFO if provenance.outcome.startswith("fallback") else logging.DEBUG
    if log.isEnabledFor(level):
        told = msgspec.structs.asdict(provenance)
        fields = " ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        fields = printable(fields.replace("fallback: ", "fallback:"))
        log.log(level, "rid=%s %s", name_of(rid), fields)


def _where_it_is_on(tell: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(tell)
    def told(*args: object) -> None:
        if tracing.is_on():
            tell(*args)

    return told


@_where_it_is_on
def matched(request: Request, outcome: str = "") -> None:
    """It was planned, or declined with this outcome."""
    told: dict[str, str | int] = {"pages": len(request.pages)}
    if outcome:
        told["outcome"] = outcome
    else:
        plan, block = request.plan, request.plan.block
        told |= {"sender": plan.sender, "location": plan.location}
        told |= {"planned_pages": len(plan.pages), "block": f"[{block.start}, {block.stop})"}
    tracing.add_slice(request.req, "match", request.seen_s, time.monotonic(), told)


@_where_it_is_on
def _trace(req: Req, provenance: RequestProvenance) -> None:
    """What is known so far of where its KV comes from."""
    names = ("outcome", "sender", "location", "reused_tokens")
    told = {name: getattr(provenance, name) for name in names}
    tracing.mark(req, {key: value for key, value in told.items() if value is not None})


@_where_it_is_on
def given_up(request: Request, cause: str) -> None:
    """It was planned, and is admitted without what it was to load."""
    now_s = time.monotonic()
    _waited(request, now_s)
    tracing.add_slice(request.req, "fallback", now_s, now_s, {"cause": cause})


@_where_it_is_on
def fell_back(req: Req, cause: str, begun_s: float) -> None:
    """It was prefilled in full, from then until now."""
    tracing.add_slice(req, "fallback", begun_s, time.monotonic(), {"cause": cause})


@_where_it_is_on
def loaded(request: Request, recompute: tuple[float, float]) -> None:
    """Its batch has run; `recompute` is (start, stop) on monotonic time."""
    req, load = request.req, request.load
    _waited(request, request.seen_s + request.queued_s)
    if len(load.plan.block):
        told = {"tokens": len(load.at), "layers": len(load.plan.block)}
        told["e_corrected"] = bool(load.plan.e_map)
        tracing.add_slice(req, "recompute", *recompute, told)
    if load.copies_s:
        told = {"tokens": len(load.at), "layers": len(load.plan.loaded_layers)}
        busy = {"busy_ms": round(1000 * load.copied_s, 3)}
        (begun_s, _), (_, ended_s) = load.copies_s[0], load.copies_s[-1]
        tracing.add_slice(req, "load", begun_s, ended_s, told | busy)


def _waited(request: Request, until_s: float) -> None:
    """How long, and how its fetch went meanwhile."""
    planned_s = request.seen_s + request.match_s
    runnable_s = until_s if request.runnable_s is None else request.runnable_s
    told = {"runnable_ms": round(1000 * max(0.0, until_s - runnable_s), 3)}
    tracing.add_slice(request.req, "wait", planned_s, until_s, told)
    if request.source is None:
        return
    staging = request.source.staging
    begun_s, steps = staging.started_s, list(staging.landed_s)  # Others land meanwhile.
    for kind in (Kind.E, Kind.KV):
        landed = [step for step in steps if step.kind is kind]
        if landed:
            sizes = {"layers": len(landed), "bytes": sum(staging.sizes[it] for it in landed)}
            stop_s = staging.landed_s[landed[-1]]
            tracing.add_slice(request.req, f"fetch_{kind.value}", begun_s, stop_s, sizes)
            begun_s = stop_s
