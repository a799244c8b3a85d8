"""What becomes of a request, as slices of SGLang's trace of it.

match      from its first sight until it was planned, or declined
fetch_e    from the start of its fetch until all E that its plan needs was in host memory
fetch_kv   and from there until all KV was
wait       from its plan until it was admitted, or the plan given up
recompute  the partial prefill of its batch
load       from the first copy into its slots to the last, beside the recompute and the forward
fallback   the full prefill in place of what did not come; a moment where the queue gave it up

Of a server without `--enable-trace` nothing is done, and nothing of a request looked at. Scheduler
thread only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from cachetree import Kind
from sglang_droidspeak.engine import tracing
from sglang_droidspeak.engine.names import Req
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.request import Request


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
def noted(req: Req, provenance: RequestProvenance) -> None:
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
