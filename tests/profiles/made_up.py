"""Profiles of pairs that are made up, for tests of what reads a profile.

A `World` says what reuse does to a pair, and `profile_of` writes down what a profiler would have
measured in it: the frontier follows from the blocks, times from the cost model, the verdict from
the frontier. Means and intervals are exact to four digits, and a seed gives the same profile again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import msgspec
from msgspec.structs import replace

from cachetree.checkpoint.family import ModelIdentity
from cachetree.ids import EMPTY_SPAN, Span
from cachetree.planning.profile import PROFILE_VERSION as VERSION
from cachetree.planning.profile import BlockQuality
from profiles.evidence import (
    Baseline,
    BaselineKind,
    CostModel,
    DataFile,
    Fidelity,
    FrontierPoint,
    HeldOutTime,
    Interval,
    LayerSensitivity,
    Making,
    MeasuredBlock,
    MeasuredProfile,
    Split,
    TaskLoss,
    TaskScores,
)

PREFIX_TOKENS: Final = 128
SUFFIX_TOKENS: Final = 24
QUESTIONS_PER_CONTEXT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A pair whose quality under a block is `full - (full - reuse) * damage(block)`."""

    num_layers: int
    group: int = 1
    num_contexts: int = 24
    full: float
    reuse: float
    sender: float
    small: float | None
    """A smaller model's quality; None where there is none."""
    damage: Callable[[Span], float]
    """Of the training split, 0 (as full prefill) to 1 (as full reuse)."""
    held_out_damage: Callable[[Span], float]
    alone: tuple[float, ...]
    """Quality lost, and about a third of the KL, when one layer alone is the sender's."""
    dropped: Callable[[Span], bool]
    costs: CostModel
    first_difference: int = 0
    seed: int = 3

    def quality(self, damage: float) -> float:
        return round(min(1.0, max(0.0, self.full - (self.full - self.reuse) * damage)), 4)

    def interval(self, mean: float) -> Interval:
        half = 1.96 * (max(mean * (1 - mean), 0.004) / (2 * self.num_contexts)) ** 0.5
        return Interval(
            mean=round(mean, 4),
            low=round(max(0.0, mean - half), 4),
            high=round(min(1.0, mean + half), 4),
        )


def profile_of(world: World) -> MeasuredProfile:
    """What a profiler would have written."""
    grid = range(0, world.num_layers, world.group)
    spans = [
        Span(start, min(stop, world.num_layers))
        for start in grid
        for stop in range(start + world.group, world.num_layers + world.group, world.group)
    ]
    measured = tuple(_measured(world, span) for span in spans)
    frontier = _frontier(world, measured)
    floor = world.full * 0.95
    plans = [it for it in reversed(frontier) if len(it.block) < world.num_layers]
    usable = [*takewhile(lambda it: it.tasks[0].bound <= 0.05, plans)]
    chosen = usable[-1] if usable else None
    return MeasuredProfile(
        version=VERSION,
        sender=_identity(world, "51"),
        receiver=_identity(world, "c4"),
        metric="token_f1",
        data_sha256="42" * 32,
        num_questions=world.num_contexts * QUESTIONS_PER_CONTEXT,
        sender_quality=world.sender,
        full_prefill_quality=world.full,
        full_reuse_quality=world.reuse,
        tolerance=0.05,
        blocks=tuple(_block_quality(it) for it in reversed(usable)),
        recommended=_block_quality(chosen) if chosen else None,
        passed=chosen is not None,
        reason=_reason(chosen, floor),
        first_difference=world.first_difference,
        train=_split(world, "train", 1),
        held_out=_split(world, "held_out", 2),
        layers=tuple(_layer(world, layer) for layer in range(world.num_layers)),
        measured=measured,
        frontier=frontier,
        order=tuple(frontier.index(it) for it in plans),
        baselines=_baselines(world, chosen.block if chosen else Span(0, world.num_layers)),
        costs=world.costs,
        made=_making(world),
    )


def costs_of(
    num_layers: int, *, layer_token_s: float, held_out_lengths: tuple[int, ...]
) -> CostModel:
    """A device on which a token costs `layer_token_s` at a layer, right to a few per cent."""
    costs = CostModel(
        layer_s=40 * layer_token_s,
        layer_token_s=layer_token_s,
        layer_token2_s=layer_token_s / 60_000,
        kv_s=8 * layer_token_s,
        kv_token_s=layer_token_s / 8,
        suffix_s=60 * num_layers * layer_token_s,
        suffix_token_s=num_layers * layer_token_s,
        suffix_token2_s=num_layers * layer_token_s / 50_000,
        load_s=30 * layer_token_s,
        load_byte_s=layer_token_s / 20_000,
        kv_bytes=4096,
        e_bytes=8192,
        num_layers=num_layers,
        fitted_on=tuple(length * 2 // 3 for length in held_out_lengths),
        held_out=(),
    )
    off = (1.03, 0.96, 1.08, 0.99, 1.12, 0.94, 1.01, 0.97, 1.05)
    plans = [
        (length, span)
        for length in held_out_lengths
        for span in (Span(0, num_layers), Span(num_layers // 6, num_layers // 2), EMPTY_SPAN)
    ]
    times = []
    for factor, (length, span) in zip(off, plans, strict=True):
        whole = len(span) == num_layers
        predicted = (
            costs.full_prefill_s(length, SUFFIX_TOKENS)
            if whole
            else costs.ttft_s((span,), length, SUFFIX_TOKENS)
        )
        times.append(
            HeldOutTime(
                num_tokens=length,
                num_suffix=SUFFIX_TOKENS,
                start=span.start,
                stop=span.stop,
                predicted_s=predicted,
                measured_s=predicted * factor,
            )
        )
    return msgspec.structs.replace(costs, held_out=tuple(times))


def _fidelity(damage: float) -> Fidelity:
    """Never that of full prefill itself, unless nothing is damaged."""
    damage = max(0.02 * (damage != 0), damage)
    return Fidelity(
        kl=round(3.1 * damage**1.3, 6),
        agreement=round(1 - 0.8 * damage, 4) if damage < 1.25 else 0.0,
        own_nll=round(0.02 + 3.2 * damage**1.3, 4),
        reference_nll=round(0.05 + 3.0 * damage**1.3, 4),
    )


def _measured(world: World, span: Span) -> MeasuredBlock:
    damage = world.damage(span)
    dropped = world.dropped(span)
    return MeasuredBlock(
        start=span.start,
        stop=span.stop,
        fidelity=_fidelity(damage),
        quality=None if dropped else world.quality(damage),
        num_questions=world.num_contexts * (1 if dropped else QUESTIONS_PER_CONTEXT),
    )


def _frontier(world: World, measured: tuple[MeasuredBlock, ...]) -> tuple[FrontierPoint, ...]:
    """Strictly better than every block of as many layers or fewer."""
    answered = [it for it in measured if it.quality is not None]
    ordered = sorted(answered, key=lambda it: (len(it.block), -(it.quality or 0.0), it.start))
    frontier: list[FrontierPoint] = []
    for it in ordered:
        quality = it.quality or 0.0
        if not frontier or quality > frontier[-1].train_quality:
            frontier.append(_frontier_point(world, it.block, quality))
    return tuple(frontier)


def point_of(
    block: Span, bound: float, *, quality: float = 0.9, needed: int | None = None
) -> FrontierPoint:
    """A plan that the gate has judged at one task."""
    return FrontierPoint(
        start=block.start,
        stop=block.stop,
        train_quality=quality,
        held_out=Interval(mean=quality, low=quality, high=quality),
        tasks=(TaskLoss(quality=quality, bound=bound, needed=needed),),
        fidelity=_fidelity(0.5),
        ttft_s=0.01,
    )


def _frontier_point(world: World, block: Span, train_quality: float) -> FrontierPoint:
    damage = world.held_out_damage(block)
    mean = world.quality(damage)
    bound = round(max(0.0, 1 - mean / world.full) + 1 / world.num_contexts, 4)
    return replace(
        point_of(block, bound, quality=mean),
        train_quality=train_quality,
        held_out=world.interval(mean),
        fidelity=_fidelity(damage),
        ttft_s=_ttft_s(world, (block,)),
    )


def _ttft_s(world: World, runs: tuple[Span, ...]) -> float:
    n, m = _lengths(world)
    if runs == (Span(0, world.num_layers),):
        return world.costs.full_prefill_s(n, m)
    return world.costs.ttft_s(runs, n, m)


def _lengths(world: World) -> tuple[int, int]:
    return (PREFIX_TOKENS if world.num_layers == 12 else 40 * PREFIX_TOKENS), SUFFIX_TOKENS


def _layer(world: World, layer: int) -> LayerSensitivity:
    noise = random.Random(100 * world.seed + layer)
    loss = world.alone[layer]
    mean_kl = max(0.0, 3.0 * loss) + 0.004 / (layer + 1)
    kl = [mean_kl * noise.lognormvariate(-0.12, 0.5) for _ in range(world.num_contexts)]
    return LayerSensitivity(
        layer=layer,
        fidelity=Fidelity(
            kl=sum(kl) / len(kl),
            agreement=max(0.0, 1 - max(0.0, loss)),
            own_nll=0.02 + mean_kl,
            reference_nll=0.05 + mean_kl,
        ),
        kl_by_context=tuple(kl),
    )


def _baselines(world: World, block: Span) -> tuple[Baseline, ...]:
    critical = max(range(world.num_layers), key=world.alone.__getitem__)
    single = tuple(Span(layer, layer + 1) for layer in block)
    kinds = [
        (BaselineKind.CACHEBLEND, float(len(block)), (), 0.62),
        (BaselineKind.TOKEN_SELECTION, float(len(block)), (), 0.66),
        (BaselineKind.CRITICAL_LAYERS, 1.0, (Span(critical, critical + 1),), 0.83),
        (BaselineKind.SPLIT_BLOCK, float(len(block)), single, 0.31),
    ]
    found = [
        Baseline(
            kind=kind,
            recomputed_layers=layers,
            runs=tuple((run.start, run.stop) for run in runs),
            quality=world.interval(world.quality(damage)),
            fidelity=_fidelity(damage),
            ttft_s=_ttft_s(world, runs) if runs else 1.1 * _ttft_s(world, (block,)),
        )
        for kind, layers, runs, damage in kinds
    ]
    if world.small is not None:
        found.append(
            Baseline(
                kind=BaselineKind.SMALL_MODEL,
                recomputed_layers=world.num_layers / 3,
                runs=(),
                quality=world.interval(world.small),
                fidelity=None,
                ttft_s=world.costs.full_prefill_s(*_lengths(world)) / 3,
            )
        )
    return tuple(found)


def _split(world: World, name: str, digit: int) -> Split:
    n, m = _lengths(world)
    num_questions = world.num_contexts * QUESTIONS_PER_CONTEXT
    return Split(
        files=(
            DataFile(name=f"{name}.jsonl", sha256=f"{digit}e" * 32, num_questions=num_questions),
        ),
        contexts=tuple(f"{name}{place}" for place in range(world.num_contexts)),
        tasks=(
            TaskScores(
                name="facts",
                metric="f1",
                num_contexts=world.num_contexts,
                num_questions=num_questions,
                sender=world.sender,
                full_prefill=world.full,
                full_reuse=world.reuse,
            ),
        ),
        num_questions=num_questions,
        mean_prefix_tokens=float(n),
        max_prefix_tokens=n + 16,
        mean_suffix_tokens=float(m),
        sender=world.interval(world.sender),
        full_prefill=world.interval(world.full),
        full_reuse=world.interval(world.reuse),
    )


def _identity(world: World, digits: str) -> ModelIdentity:
    return ModelIdentity(
        architecture="LlamaForCausalLM",
        num_layers=world.num_layers,
        hidden_size=128,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope='{"rope_theta":10000.0,"rope_type":"default"}',
        tokenizer="b9" * 32,
        weights=digits * 32,
    )


def _block_quality(point: FrontierPoint) -> BlockQuality:
    return BlockQuality(start=point.start, stop=point.stop, quality=point.held_out.mean)


def _reason(chosen: FrontierPoint | None, floor: float) -> str:
    if chosen is None:
        return "no block smaller than all layers is within the tolerance"
    compared = "at least" if chosen.held_out.mean >= floor else "below"
    return (
        f"layers [{chosen.start}, {chosen.stop}) reach token F1 {chosen.held_out.mean:.3f} on "
        f"held-out questions, {compared} {floor:.3f}"
    )


def _making(world: World) -> Making:
    starts = -(-world.num_layers // world.group)
    return Making(
        date="2026-01-02T03:04:05Z",
        command="droidspeak profile --sender sender --receiver receiver --data train.jsonl",
        versions={"torch": "2.14.1", "transformers": "5.19.0"},
        hardware="AMD EPYC, 2 cores",
        device="cpu",
        dtype="bfloat16",
        seed=world.seed,
        group=world.group,
        page_size=16,
        template="<bos> {context} {input}",
        max_new=8,
        pruned=True,
        prefix_passes=2 * world.num_contexts * (starts + 3),
        sweep_passes_per_context=starts,
        elapsed_s=754.0,
    )
