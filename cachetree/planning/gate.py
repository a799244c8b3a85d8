"""The gate: decide which blocks a request may recompute over a sender's cache. Pure.

own model      an empty block: every layer is loaded. The KV is exact, so no profile is needed.
another model  without a profile: only lossless blocks, which recompute all layers from the first
             that differs, or from a lower layer that has E. With a profile that passed its gate:
             also its proven plans, for prompts that are not longer than the profile measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from cachetree.ids import EMPTY_SPAN, LOCAL, ModelId, Span
from cachetree.planning.plan import Demand, Gate, Match, NoReuse, Reason, Requested
from cachetree.planning.profile import BlockQuality, PairProfile

Profiles = Mapping[tuple[ModelId, ModelId], PairProfile]
"""Profiles by (sender, receiver)."""


def index_profiles(profiles: Iterable[PairProfile]) -> Profiles:
    """Index profiles by their models' ids, once at the start: computing ids would slow requests."""
    return {(it.sender.model_id, it.receiver.model_id): it for it in profiles}


def allowed_blocks(
    demand: Demand, match: Match, profiles: Profiles
) -> list[BlockQuality] | NoReuse:
    """Return the blocks that this request may recompute over this sender's KV, or why there are
    none."""
    block = demand.requested.block
    if block is not None and block.stop > demand.num_layers:
        too_large = f"layer {block.stop - 1} of a model of {demand.num_layers} layers"
        return NoReuse(reason=Reason.UNGATED_BLOCK, detail=too_large)
    if match.model == demand.receiver:
        # The receiver's own cache is exact. It gets a block only if the request names one.
        if not block or demand.requested.sender == match.model:
            return [_quality(block or EMPTY_SPAN, 1.0)]
        allowed = _allowed_of_others(demand, profiles)
        if demand.gate is Gate.ENFORCE and block not in (it.block for it in allowed):
            return _ungated(block, allowed)
        return [_quality(EMPTY_SPAN, 1.0)]
    profile = profiles.get((match.model, demand.receiver))
    is_free = demand.gate is Gate.NONE
    if block is not None and is_free:
        known = profile.blocks if profile is not None else ()
        e_map = next((it.e_map for it in known if it.block == block), None)
        return [msgspec.structs.replace(_quality(block, 0.0), e_map=e_map)]
    lossless = _lossless(demand, match, profile)
    if profile is None and not lossless:
        return NoReuse(reason=Reason.NO_PROFILE, detail=f"no profile with sender {match.model}")
    passed = profile is not None and (profile.passed or is_free)
    measured = profile.blocks if profile is not None and passed else ()
    free = {it.block for it in lossless}
    proven = [it for it in measured if it.block not in free]
    num_tokens = demand.num_pages * demand.page_size
    is_covered = is_free or profile is None or profile.covers(num_tokens)
    allowed = lossless + (proven if is_covered else [])
    if not allowed and proven and profile is not None:
        return NoReuse(
            reason=Reason.LONGER_THAN_MEASURED,
            detail=f"{num_tokens} tokens of prompt, and the profile was measured on enough "
            f"prompts of up to {profile.measured_tokens} only",
        )
    if not allowed:
        reason = profile.reason if profile and not passed else "the profile has no proven block"
        return NoReuse(reason=Reason.GATE_FAILED, detail=reason)
    if block is None:
        return allowed
    return [it for it in allowed if it.block == block] or _ungated(block, allowed)


def _allowed_of_others(demand: Demand, profiles: Profiles) -> list[BlockQuality]:
    """Return the blocks that the gate would allow if known senders had the whole prompt and E."""
    known = {sender for sender, receiver in profiles if receiver == demand.receiver}
    allowed: list[BlockQuality] = []
    for sender in known | demand.first_differences.keys():
        everything = Match(
            model=sender,
            location=LOCAL,
            num_pages=demand.num_pages,
            e_pages=dict.fromkeys(range(demand.num_layers), demand.num_pages),
        )
        free = replace(demand, requested=Requested())
        blocks = allowed_blocks(free, everything, profiles)
        allowed += blocks if isinstance(blocks, list) else []
    return allowed


def _ungated(block: Span, allowed: Sequence[BlockQuality]) -> NoReuse:
    names = ", ".join(sorted({_named(it.block) for it in allowed}))
    return NoReuse(
        reason=Reason.UNGATED_BLOCK,
        detail=f"block {_named(block)} is none of those that a profile has proven; "
        + (f"allowed: {names}" if names else "no block is allowed"),
    )


def _named(block: Span) -> str:
    """Write a block as a request's control `block` does: `START:STOP`, or `none`."""
    return f"{block.start}:{block.stop}" if len(block) else "none"


def first_difference(demand: Demand, sender: ModelId, profile: PairProfile | None) -> int:
    known = demand.first_differences.get(sender)
    return known if known is not None else profile.first_difference if profile else 0


def _lossless(demand: Demand, match: Match, profile: PairProfile | None) -> list[BlockQuality]:
    """Return the lossless blocks: each recomputes all layers from the first that differs, or from a
    lower layer that has E. If no layer differs, the only block is empty."""
    differs = first_difference(demand, match.model, profile)
    quality = profile.full_prefill_quality if profile is not None else 1.0
    if differs == demand.num_layers:
        return [_quality(EMPTY_SPAN, quality)]
    starts = {differs, *(layer for layer in match.e_pages if layer < differs)} - {0}
    return [_quality(Span(start, demand.num_layers), quality) for start in sorted(starts)]


def _quality(block: Span, quality: float) -> BlockQuality:
    return BlockQuality(start=block.start, stop=block.stop, quality=quality)
