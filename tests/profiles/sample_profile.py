"""Profiles for tests of code that reads one: a shipped profile of 12 layers, and changed copies of
it."""

from __future__ import annotations

from msgspec.structs import replace
from shipped import SHIPPED

from cachetree.ids import Span
from cachetree.planning.profile import BlockQuality
from profiles.evidence import Baseline, BaselineKind, MeasuredProfile, read_measured
from profiles.stats.choice import grid


def sample_profile() -> MeasuredProfile:
    """Return a profile in which [2, 5) passes. A smaller model was measured beside the pair."""
    profile = read_measured(SHIPPED[0].profile)
    small = Baseline(
        kind=BaselineKind.SMALL_MODEL,
        recomputed_layers=4.0,
        runs=(),
        quality=profile.held_out.sender,
        fidelity=None,
        ttft_s=0.01,
    )
    return replace(profile, baselines=(*profile.baselines, small))


def failed_profile() -> MeasuredProfile:
    """Return a profile in which only the block of all layers passes, so nothing is recommended."""
    profile = sample_profile()
    frontier = tuple(
        replace(it, tasks=tuple(replace(task, bound=0.3) for task in it.tasks))
        for it in profile.frontier
    )
    reason = "no plan smaller than all layers passed"
    blocks = profile.blocks[-1:]
    return replace(
        profile, frontier=frontier, blocks=blocks, recommended=None, passed=False, reason=reason
    )


def stretched(times: int, group: int = 1) -> MeasuredProfile:
    """Return the profile of a model with `times` as many layers."""
    profile = sample_profile()
    num_layers = 12 * times

    def longer(block):
        return replace(block, start=block.start * times, stop=block.stop * times)

    measured = {(it.start, it.stop): it for it in profile.measured}
    return replace(
        profile,
        sender=replace(profile.sender, num_layers=num_layers),
        receiver=replace(profile.receiver, num_layers=num_layers),
        layers=tuple(replace(profile.layers[i // times], layer=i) for i in range(num_layers)),
        measured=tuple(
            replace(measured[it.start // times, -(-it.stop // times)], start=it.start, stop=it.stop)
            for it in grid(num_layers, group)
        ),
        frontier=tuple(map(longer, profile.frontier)),
        blocks=tuple(map(longer, profile.blocks)),
        recommended=longer(profile.recommended),
        baselines=tuple(
            replace(
                it,
                recomputed_layers=it.recomputed_layers * times,
                runs=tuple((start * times, stop * times) for start, stop in it.runs),
            )
            for it in profile.baselines
        ),
        costs=replace(profile.costs, num_layers=num_layers),
        made=replace(profile.made, group=group),
    )


def whole_model(profile: MeasuredProfile) -> MeasuredProfile:
    whole = BlockQuality(start=0, stop=12, quality=profile.full_prefill_quality)
    return replace(profile, recommended=whole, passed=False)


def one_group(profile: MeasuredProfile) -> MeasuredProfile:
    whole = next(it for it in profile.measured if len(it.block) == 12)
    return replace(
        profile,
        measured=(whole,),
        frontier=(replace(profile.frontier[-1], start=0, stop=12),),
        recommended=None,
        passed=False,
        made=replace(profile.made, group=12),
    )


def identical(profile: MeasuredProfile) -> MeasuredProfile:
    """Return the profile of two models with equal layers: no plan loses anything."""
    full = profile.held_out.full_prefill
    layers = [
        replace(
            it, fidelity=replace(it.fidelity, kl=0.0), kl_by_context=(0.0,) * len(it.kl_by_context)
        )
        for it in profile.layers
    ]
    measured = [
        replace(it, quality=full.mean, fidelity=replace(it.fidelity, kl=0.0))
        for it in profile.measured
    ]
    return replace(profile, layers=tuple(layers), measured=tuple(measured), first_difference=12)


def all_dropped(profile: MeasuredProfile) -> MeasuredProfile:
    measured = [replace(it, quality=None) for it in profile.measured if len(it.block) < 12]
    return replace(profile, measured=tuple(measured), frontier=(), recommended=None, passed=False)


def bare(profile: MeasuredProfile) -> MeasuredProfile:
    """Return the profile without baselines and without checked times."""
    return replace(profile, baselines=(), costs=replace(profile.costs, held_out=()))


def place_of(profile: MeasuredProfile, block: Span) -> int:
    return [it.block for it in profile.frontier].index(block)
