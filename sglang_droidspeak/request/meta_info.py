"""What a response says under `meta_info["droidspeak"]`: a list with one entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cachetree import DISK, LOCAL, is_pool

if TYPE_CHECKING:
    from cachetree.planning import Plan
    from sglang_droidspeak.request.request import Request

KEY = "droidspeak"
"""In `/server_info`, too."""


class RequestProvenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of one request's prompt came from."""

    outcome: str
    """`reused`, `own`, `fallback: CAUSE`, or why nothing was reused."""
    reused_tokens: int = 0
    """Prompt tokens whose KV was loaded, recomputed in part, or both."""
    exact: bool = True
    """False where prompt KV descends from another model's or from encoded KV, also through this
    server's own cache."""
    approximate_tokens: int = 0
    """Prompt tokens whose KV was made from another model's, or was encoded, for this request or an
    earlier one; what was computed after them is not counted. 0 if `exact`."""
    sender: str | None = None
    """Model id of the one whose cache was read."""
    sender_name: str | None = None
    """What that model is called; null if this server knows no name."""
    receiver: str | None = None
    """Model id of the one that read it and answered."""
    not_invoked: bool = False
    """True if the prompt never invokes the activated LoRA that the request names, so that the base
    answered."""
    location: str | None = None
    """Where it lay: a peer's address, or `local`, `pool`, `disk` or `hicache`."""
    block: tuple[int, int] | None = None
    """Layers recomputed, half-open; null where none were."""
    recomputed_layers: int = 0
    """How many layers were recomputed."""
    e_corrected: bool = False
    """Whether a map of the profile brought the sender's E closer to this model's before."""
    loaded_layers: int = 0
    """How many layers were loaded."""
    fetched_bytes: int = 0
    """E and KV moved for this request; 0 where it was given up before it was admitted."""
    match_ms: float = 0.0
    """To hash the prompt, match it and plan; with a `hicache_backend` also to ask it, and where
    another request of this server computed the same, to wait for that."""
    queued_ms: float = 0.0
    """From first sight to admission, or to giving the plan up; the fetch runs meanwhile."""
    fetch_ms: float = 0.0
    """Until all layers were in host memory."""
    load_ms: float = 0.0
    """Copying into KV slots, beside the recompute and the forward; on CUDA, issuing the copies."""
    recompute_ms: float = 0.0
    """Partial prefill of the batch; on CUDA, issuing it."""
    forward_ms: float = 0.0
    """The batch's own forward over new tokens; on CUDA, issuing it."""
    overlap: float = 0.0
    """Share of the shorter of fetch and recompute during which the other ran too."""
    detail: str | None = None
    """The outcome for a person: what was wrong with the request's controls, and what is allowed;
    null where nothing is to be added."""


def provenance_of(
    request: Request, recompute: tuple[float, float], forward_s: float
) -> RequestProvenance:
    """Of one that has loaded; `recompute` is (start, stop) on monotonic time."""
    load, plan, staging = request.load, request.plan, request.source.staging
    queued_ms = _ms(request.queued_s)
    if load.cause:
        return RequestProvenance(
            outcome=f"fallback: {load.cause}",
            sender=plan.sender,
            fetched_bytes=staging.num_landed_bytes,
            queued_ms=queued_ms,
        )
    fetch = (staging.started_s, staging.completed_s or staging.started_s)
    return RequestProvenance(
        outcome=outcome_of(plan),
        reused_tokens=len(load.at),
        exact=plan.is_exact,
        sender=plan.sender,
        receiver=plan.receiver,
        location="pool" if is_pool(plan.location) else plan.location,
        block=plan.id.block,
        recomputed_layers=len(plan.block),
        e_corrected=bool(plan.e_map),
        loaded_layers=len(plan.loaded_layers),
        fetched_bytes=staging.num_bytes,
        match_ms=_ms(request.match_s),
        queued_ms=queued_ms,
        fetch_ms=_ms(fetch[1] - fetch[0]),
        load_ms=_ms(load.copied_s),
        recompute_ms=_ms(recompute[1] - recompute[0]),
        forward_ms=_ms(forward_s),
        overlap=round(_overlap(fetch, recompute), 4),
    )


def outcome_of(plan: Plan) -> str:
    """Where nothing goes wrong."""
    is_own = plan.sender == plan.receiver and plan.location in (LOCAL, DISK)
    return "own" if is_own else "reused"


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    shorter = min(a[1] - a[0], b[1] - b[0])
    common = min(a[1], b[1]) - max(a[0], b[0])
    return max(0.0, common / shorter) if shorter > 0 else 0.0
