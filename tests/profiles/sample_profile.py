"""Made-up profiles that agree with themselves: one clear, one graded, one that fails."""

from __future__ import annotations

import dataclasses
import random

from made_up import World, costs_of, profile_of
from msgspec.structs import replace

from cachetree.ids import Span
from cachetree.planning.profile import BlockQuality
from profiles.evidence import MeasuredProfile


def sample_profile() -> MeasuredProfile:
    """12 layers of which the fourth dominates; [2, 5) passes, and so does [0, 6)."""
    return profile_of(sample_world())


def sample_world() -> World:
    alone = (0.014, 0.0, 0.028, 0.042, 0.781, 0.014, 0.0, 0.0, -0.007, 0.0, 0.007, 0.0)
    return World(
        num_layers=12,
        full=0.9931,
        reuse=0.1667,
        sender=0.2222,
        small=0.6105,
        damage=lambda block: _dominated(block, (0.029, 0.03, 0.028, 0.45, 0.83)),
        held_out_damage=lambda block: _dominated(block, (0.012, 0.012, 0.0085, 0.5, 0.84)),
        alone=alone,
        dropped=lambda block: 4 not in block and len(block) > 3,
        costs=costs_of(12, layer_token_s=6e-6, held_out_lengths=(96, 144, 192)),
    )


def graded_profile(num_layers: int = 32, group: int = 1) -> MeasuredProfile:
    """Every layer matters a little and some matter more; qualities are noisy."""
    noise = random.Random(num_layers)
    weights = [0.15 + noise.random() ** 2 for _ in range(num_layers)]
    for layer in range(num_layers // 8, num_layers // 3):
        weights[layer] += 2.2 * noise.random()
    total = sum(weights)
    jitter = {
        (start, stop): noise.gauss(0, 0.03)
        for start in range(num_layers)
        for stop in range(start + 1, num_layers + 1)
    }

    def damage(block: Span) -> float:
        if len(block) == num_layers:
            return 0.0
        left = sum(weights[i] for i in range(num_layers) if i not in block)
        before = sum(weights[: block.start])
        lost = (0.9 * left + 0.27 * before) / total - 0.1
        return max(-0.1, lost + jitter[block.start, block.stop])

    def held_out_damage(block: Span) -> float:
        whole = len(block) == num_layers
        return 0.0 if whole else damage(block) - 0.8 * jitter[block.stop - 1, block.stop] + 0.02

    return profile_of(
        World(
            num_layers=num_layers,
            group=group,
            num_contexts=50,
            full=0.4712,
            reuse=0.3105,
            sender=0.3388,
            small=None,
            damage=damage,
            held_out_damage=held_out_damage,
            alone=tuple(round(0.16 * w / total * 3 + noise.gauss(0, 0.002), 4) for w in weights),
            dropped=lambda block: damage(block) > 0.75 - 0.5 * len(block) / num_layers,
            costs=costs_of(
                num_layers, layer_token_s=2.4e-6, held_out_lengths=(3_000, 6_000, 12_000)
            ),
        )
    )


def failed_profile() -> MeasuredProfile:
    """Every block but that of all layers loses too much, so nothing is recommended."""

    def damage(block: Span) -> float:
        return 0.0 if len(block) == 12 else 1 - 0.5 * (len(block) / 12) ** 2

    return profile_of(
        dataclasses.replace(
            sample_world(),
            damage=damage,
            held_out_damage=damage,
            alone=tuple(0.2 + 0.01 * ((5 * i) % 12) for i in range(12)),
        )
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
    """Of two models with equal layers: nothing costs anything."""
    full = profile.held_out.full_prefill
    layers = [
        replace(
            it,
            fidelity=replace(it.fidelity, kl=0.0),
            kl_by_context=(0.0,) * 24,
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
    """Without baselines and without checked times."""
    return replace(profile, baselines=(), costs=replace(profile.costs, held_out=()))


def _dominated(block: Span, by_start: tuple[float, ...]) -> float:
    """The block has to contain layer 4 and what feeds it."""
    if 4 not in block:
        return 1.0 - 0.005 * len(block)
    return 0.0 if block.start == 0 and block.stop >= 6 else by_start[block.start]
