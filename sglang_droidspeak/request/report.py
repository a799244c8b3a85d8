"""Report each request once: in `meta_info`, in the log and in the metrics. Before that, add its
phases to SGLang's trace, one slice for each:

match      from first sight until the request was planned or declined
fetch_e    from the start of the fetch until all E of the plan was in host memory
fetch_kv   from then until all KV was in host memory
wait       from the plan until the request was admitted, or the plan given up
recompute  the partial prefill of the batch
load       from the first copy into the slots to the last, beside the recompute and the forward
fallback   the full prefill in place of a load; of no length if the request gave up while it waited

A server without `--enable-trace` makes no slices. Scheduler thread only.
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
"""Largest number of prompts with several samples that are remembered."""
MAX_ANSWERED: Final = 1000
"""Largest number of answered requests that are kept, so that `explain` can show them."""
MAX_ID: Final = 256
"""Largest number of characters of a request's id with which `explain` can find the request."""
MAX_MATCHES: Final = 32_000
"""Largest number of matches in all kept labels together. The oldest label is forgotten first."""


@dataclass(slots=True, eq=False)
class Label:
    """Facts about one request, kept after its answer. They contain no token of the request."""

    provenance: RequestProvenance
    num_tokens: int = 0
    """Number of the prompt's tokens. 0 until the request is answered."""
    considered: Considered | None = None
    """Inputs of the choice among plans. None if there was no choice."""
    is_answered: bool = False
    """Whether the request was answered. Then the label is final."""

    @property
    def num_matches(self) -> int:
        return len(self.considered.matches) if self.considered is not None else 0


class Labels:
    """Labels of all requests: updated while a request proceeds, then reported and counted once.

    A label is final when SGLang first sends output of the request. Later events, such as a
    retraction, do not change it. Scheduler thread only.
    """

    def __init__(self, metrics: Metrics, names: ModelNames) -> None:
        self.metrics: Final = metrics
        self._names: Final = names
        self.answered: Final[OrderedDict[str, Label]] = OrderedDict()
        """Labels of answered requests by id, the latest last."""
        self._num_matches = 0
        self._warmed: Final[OrderedDict[int, RequestProvenance]] = OrderedDict()
        """Provenance of the prefill that SGLang makes before the samples of a prompt (`n` > 1).
        Keys are prompt and controls."""

    def note(self, req: Req, provenance: RequestProvenance) -> None:
        """Set a request's provenance so far. Ignored once the label is final."""
        label = _label_of(req)
        if not label.is_answered:
            label.provenance = provenance
            _trace(req, provenance)

    def report(self, reqs: Sequence[Req], skip_req: Req | None = None) -> None:
        """Report these requests once, before SGLang sends their new output.

        `skip_req` is left out, because it has not been prefilled to its end. Retracted requests are
        left out, too, because they will be prefilled again.
        """
        # In a decoding batch all labels are final, and this check is the only cost.
        for req in [req for req in reqs if not _label_of(req).is_answered]:
            if not (req is skip_req or req.is_retracted):
                ended = req.finished_reason or req.to_finish
                self._tell(req, is_aborted=isinstance(ended, FINISH_ABORT))

    def aborted(self, _scheduler: object, _abort: object, req: Req) -> None:
        """Report a request that was aborted. Hooks Scheduler.send_abort_output."""
        self._tell(req, is_aborted=True)

    def _tell(self, req: Req, *, is_aborted: bool) -> None:
        label, params = _label_of(req), req.sampling_params
        if label.is_answered:
            return
        label.is_answered = True
        if is_health_check_generate_req(req):
            return
        # A request that has read nothing is exact, and in the queue it has read nothing yet.
        is_admitted, provenance = req.extend_end is not None, label.provenance
        is_exact = provenance.exact and not (is_admitted and prefixes.is_approximate(req))
        num_approximate = 0 if is_exact else prefixes.num_approximate(req)
        read = {"exact": is_exact, "approximate_tokens": num_approximate}
        provenance = label.provenance = msgspec.structs.replace(provenance, **read)
        if is_aborted and not provenance.reused_tokens:
            provenance = RequestProvenance(outcome="aborted", **read)
        elif params.n > 1:
            if params.max_new_tokens == 0:
                self._warmed[_prompt(req)] = provenance
                if len(self._warmed) > _MAX_WARMED:
                    self._warmed.popitem(last=False)
                return
            warmed = self._warmed.get(_prompt(req), provenance)
            # An exact sample of an inexact first request has not read the reused KV.
            has_read = provenance.reused_tokens or provenance.outcome.startswith("fallback")
            if not has_read and warmed.exact == is_exact:
                provenance = warmed
        if prefixes.is_not_invoked(req):
            provenance = msgspec.structs.replace(provenance, not_invoked=True)
        names = self._names.now
        provenance = msgspec.structs.replace(
            provenance,
            sender_name=names.get(provenance.sender or ""),
            detail=provenance.detail and with_names(provenance.detail, names),
        )
        label.provenance, label.num_tokens = provenance, len(req.origin_input_ids)
        if not asking.is_own(req):
            if provenance.not_invoked:
                self.metrics.not_invoked.inc()
            num_approximate = 0 if is_aborted else provenance.approximate_tokens
            outcome = "aborted" if is_aborted else provenance.outcome
            self.metrics.count_outcome(
                outcome, exact=provenance.exact or is_aborted, num_approximate=num_approximate
            )
            self._keep(req.rid, label)
            _write(req.rid, provenance)
        req.customized_info = {
            **(req.customized_info or {}),
            KEY: [msgspec.to_builtins(provenance)],
        }

    def _keep(self, rid: str, label: Label) -> None:
        if len(rid) > MAX_ID:
            return
        replaced = self.answered.pop(rid, None)
        self.answered[rid] = label
        self._num_matches += label.num_matches - (replaced.num_matches if replaced else 0)
        while len(self.answered) > MAX_ANSWERED or self._num_matches > MAX_MATCHES:
            self._num_matches -= self.answered.popitem(last=False)[1].num_matches


def _label_of(req: Req) -> Label:
    label: Label | None = getattr(req, _LABEL, None)
    if label is None:
        label = Label(RequestProvenance(outcome="error"))
        setattr(req, _LABEL, label)
    return label


def must_stay_exact(req: Req) -> bool:
    """Whether a request was reported as exact, and was retracted since."""
    label = _label_of(req)
    return label.is_answered and label.provenance.exact


def consider(req: Req, considered: Considered | None) -> None:
    """Set the inputs of the choice among a request's plans. Ignored once the label is final."""
    label = _label_of(req)
    if not label.is_answered:
        label.considered = considered


def _prompt(req: Req) -> int:
    tokens, custom = req.origin_input_ids.tobytes(), req.sampling_params.custom_params
    controls = repr(custom.get(KEY)) if isinstance(custom, dict) else None
    return hash((tokens, controls, req.lora_id, prefixes.tenant_of(req), req.cache_salt))


def _write(rid: str, provenance: RequestProvenance) -> None:
    """Log a reuse that became a full prefill at INFO, any other request at DEBUG."""
    level = logging.INFO if provenance.outcome.startswith("fallback") else logging.DEBUG
    if log.isEnabledFor(level):
        values = msgspec.structs.asdict(provenance)
        fields = " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        fields = printable(fields.replace("fallback: ", "fallback:"))
        log.log(level, "rid=%s %s", name_of(rid), fields)


def _where_it_is_on(tell: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(tell)
    def traced(*args: object) -> None:
        if tracing.is_on():
            tell(*args)

    return traced


@_where_it_is_on
def matched(request: Request, outcome: str = "") -> None:
    """Add the slice `match`: the request was planned, or was declined with `outcome`."""
    details: dict[str, str | int] = {"pages": len(request.pages)}
    if outcome:
        details["outcome"] = outcome
    else:
        plan, block = request.plan, request.plan.block
        details |= {"sender": plan.sender, "location": plan.location}
        details |= {"planned_pages": len(plan.pages), "block": f"[{block.start}, {block.stop})"}
    tracing.add_slice(request.req, "match", request.seen_s, time.monotonic(), details)


@_where_it_is_on
def _trace(req: Req, provenance: RequestProvenance) -> None:
    """Set the request's provenance so far as attributes of its trace."""
    names = ("outcome", "sender", "location", "reused_tokens")
    details = {name: getattr(provenance, name) for name in names}
    tracing.mark(req, {key: value for key, value in details.items() if value is not None})


@_where_it_is_on
def given_up(request: Request, cause: str) -> None:
    """Add the slices of a planned request that is admitted without its load."""
    now_s = time.monotonic()
    _waited(request, now_s)
    tracing.add_slice(request.req, "fallback", now_s, now_s, {"cause": cause})


@_where_it_is_on
def fell_back(req: Req, cause: str, begun_s: float) -> None:
    """Add the slice `fallback`: a full prefill from `begun_s` until now."""
    tracing.add_slice(req, "fallback", begun_s, time.monotonic(), {"cause": cause})


@_where_it_is_on
def loaded(request: Request, recompute: tuple[float, float]) -> None:
    """Add the slices of a request that has loaded. `recompute` is (start, stop), monotonic."""
    req, load = request.req, request.load
    _waited(request, request.seen_s + request.queued_s)
    if len(load.plan.block):
        details = {"tokens": len(load.at), "layers": len(load.plan.block)}
        details["e_corrected"] = bool(load.plan.e_map)
        tracing.add_slice(req, "recompute", *recompute, details)
    if load.copies_s:
        details = {"tokens": len(load.at), "layers": len(load.plan.loaded_layers)}
        busy = {"busy_ms": round(1000 * load.copied_s, 3)}
        (begun_s, _), (_, ended_s) = load.copies_s[0], load.copies_s[-1]
        tracing.add_slice(req, "load", begun_s, ended_s, details | busy)


def _waited(request: Request, until_s: float) -> None:
    """Add the slices of the request's wait until `until_s`, and of its fetch."""
    planned_s = request.seen_s + request.match_s
    runnable_s = until_s if request.runnable_s is None else request.runnable_s
    details = {"runnable_ms": round(1000 * max(0.0, until_s - runnable_s), 3)}
    tracing.add_slice(request.req, "wait", planned_s, until_s, details)
    if request.source is None:
        return
    staging = request.source.staging
    begun_s, steps = staging.started_s, list(staging.landed_s)  # More steps land meanwhile.
    for kind in (Kind.E, Kind.KV):
        landed = [step for step in steps if step.kind is kind]
        if landed:
            sizes = {"layers": len(landed), "bytes": sum(staging.sizes[it] for it in landed)}
            stop_s = staging.landed_s[landed[-1]]
            tracing.add_slice(request.req, f"fetch_{kind.value}", begun_s, stop_s, sizes)
            begun_s = stop_s
