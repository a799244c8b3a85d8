"""Build a response's `meta_info["droidspeak"]`: a list with one entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cachetree import DISK, LOCAL, is_pool

if TYPE_CHECKING:
    from cachetree.planning import Plan
    from sglang_droidspeak.request.request import Request

KEY = "droidspeak"
"""Key of this extension in a response's `meta_info`, and in `/server_info`."""


class RequestProvenance(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of the KV of one request's prompt."""

    outcome: str
    """`reused`, `own`, `fallback: CAUSE`, or why nothing was reused."""
    reused_tokens: int = 0
    """Prompt tokens with KV that was loaded, recomputed in part, or both."""
    exact: bool = True
    """Whether all KV of the prompt is exact, including KV that earlier requests have left in this
    server's cache."""
    approximate_tokens: int = 0
    """Prompt tokens with KV that was made from another model's KV, or was encoded. The KV may have
    been made for an earlier request. Tokens that were computed after them do not count. 0 if
    `exact`."""
    sender: str | None = None
    """Id of the model that computed the cache."""
    sender_name: str | None = None
    """Name of the sender. Null if this server knows no name."""
    receiver: str | None = None
    """Id of the model that read the cache and answered."""
    not_invoked: bool = False
    """True if the prompt never invokes the activated LoRA that the request names. The base has then
    answered."""
    location: str | None = None
    """Location of the cache: a peer's address, or `local`, `pool`, `disk` or `hicache`."""
    block: tuple[int, int] | None = None
    """Layers that were recomputed, half-open. Null if no layer was."""
    recomputed_layers: int = 0
    """Number of layers that were recomputed."""
    e_corrected: bool = False
    """Whether a map of the profile has corrected the sender's E before the recompute."""
    loaded_layers: int = 0
    """Number of layers that were loaded."""
    fetched_bytes: int = 0
    """Bytes of E and KV that were moved for this request. 0 if reuse was given up before
    admission."""
    match_ms: float = 0.0
    """Milliseconds to hash the prompt, match it and plan. This includes questions to a
    `hicache_backend`, and the wait for another request of this server that computes the same
    pages."""
    queued_ms: float = 0.0
    """Milliseconds in the queue until the request was admitted, or gave up its plan. The fetch runs
    meanwhile."""
    fetch_ms: float = 0.0
    """Milliseconds until all layers were in host memory."""
    load_ms: float = 0.0
    """Milliseconds of copying into KV slots, at the same time as the recompute and the forward. On
    CUDA, milliseconds of issuing these copies."""
    recompute_ms: float = 0.0
    """Milliseconds of the batch's partial prefill. On CUDA, milliseconds of issuing it."""
    forward_ms: float = 0.0
    """Milliseconds of the batch's own forward over new tokens. On CUDA, milliseconds of issuing
    it."""
    overlap: float = 0.0
    """Time for which fetch and recompute overlapped, as a share of the shorter one."""
    detail: str | None = None
    """Addition to the outcome for a person, such as a wrong control and the allowed values. Null if
    there is none."""


def provenance_of(
    request: Request, recompute: tuple[float, float], forward_s: float
) -> RequestProvenance:
    """Return the provenance of a request that has loaded. `recompute` is (start, stop) on monotonic
    time."""
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
    """Return the outcome that a request gets if its plan succeeds."""
    is_own = plan.sender == plan.receiver and plan.location in (LOCAL, DISK)
    return "own" if is_own else "reused"


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    shorter = min(a[1] - a[0], b[1] - b[0])
    common = min(a[1], b[1]) - max(a[0], b[0])
    return max(0.0, common / shorter) if shorter > 0 else 0.0
