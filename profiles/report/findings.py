"""What each picture shows, said in words that are computed from the data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

from cachetree.evidence import MeasuredProfile
from profiles.report import derived, words

PAPER_GAP: Final = 0.04
"""Largest gap between training and held-out quality in DroidSpeak (fig. 17)."""


@dataclass(frozen=True, slots=True)
class Finding:
    title: str
    """What the data says; stands over the picture."""
    sentence: str
    """What to see; stands under it."""


def sensitivity(profile: MeasuredProfile) -> Finding:
    metric = words.metric_name(profile.metric)
    losses = {it.layer: derived.loss_of(profile, it) for it in profile.layers}
    critical = derived.critical_layers(profile)
    worst = max(losses, key=lambda layer: losses[layer], default=0)
    largest = losses.get(worst, 0.0)
    others = max((loss for layer, loss in losses.items() if layer not in critical), default=0.0)
    if not critical:
        title = (
            f"No single layer is critical: the largest loss is "
            f"{words.num_points(max(0.0, largest))} of {metric}"
        )
    elif len(critical) == 1:
        rest = f"; no other more than {words.points(max(0.0, others))}" if len(losses) > 1 else ""
        title = f"Layer {worst} alone costs {words.num_points(largest)} of {metric}{rest}"
    else:
        which = (
            f"All {len(losses)} layers"
            if len(critical) == len(losses)
            else f"{len(critical)} of {words.counted(len(losses), 'layer')}"
        )
        title = (
            f"{which} are critical; the worst, layer {worst}, alone costs "
            f"{words.num_points(largest)} of {metric}"
        )
    most_kl = max(profile.layers, key=lambda it: it.fidelity.kl, default=None)
    also = (
        "; the KL below is 0 at every layer"
        if most_kl is None or most_kl.fidelity.kl <= 0
        else f"; the KL below is largest at layer {most_kl.layer}"
        f"{' too' if most_kl.layer == worst else ''} "
        f"({words.small(most_kl.fidelity.kl)} nats per token)"
    )
    rule = (
        f"at least {words.percent(derived.CRITICAL_SHARE)} of the largest loss and "
        f"{words.num_points(derived.CRITICAL_LOSS)}"
    )
    marked = (
        f"Orange bars are critical ({words.layers(critical)}): one of them alone, "
        f"taken from the sender, costs {rule}"
        if critical
        else f"No bar is orange: no layer's KV, taken alone from the sender, costs {rule}"
    )
    return Finding(title, f"{marked}{also}.")


def spread(profile: MeasuredProfile) -> Finding:
    found = derived.agreement(profile)
    if not any(value > 0 for it in profile.layers for value in it.kl_by_context):
        return Finding(
            "Reusing any one layer changes nothing on any context",
            "All values are zero: the receiver follows itself exactly whichever layer is reused.",
        )
    contexts = words.counted(found.num_contexts, "context")
    size = len(found.layers)
    only = "" if found.share >= 0.5 else "only "
    if size == 1:
        hits = round(found.share * found.num_contexts)
        title = f"Layer {found.layers[0]} is the most affected on {only}{hits} of {contexts}"
    else:
        title = (
            f"The {size} layers most affected on average make up {only}"
            f"{words.percent(found.share)} of a context's own top {size}"
        )
    worst = max(profile.layers, key=lambda it: median(it.kl_by_context or (0.0,)))
    return Finding(
        title,
        f"Each dot is one of {contexts} and each box their middle half: layer {worst.layer}, with "
        f"the largest median KL, ranges from {words.small(min(worst.kl_by_context))} to "
        f"{words.small(max(worst.kl_by_context))} nats per token; by chance the share would be "
        f"{words.percent(size / len(profile.layers))}.",
    )


def blocks(profile: MeasuredProfile) -> Finding:
    good = derived.within_tolerance(profile)
    num_layers = derived.num_layers(profile)
    num_smaller = sum(len(it.block) < num_layers for it in profile.measured)
    dropped = sum(it.quality is None for it in profile.measured)
    tolerance = words.percent(profile.tolerance)
    if not good:
        title = f"No block smaller than all layers stays within {tolerance} of full prefill"
        inside = "inside the line is nothing but that corner"
    else:
        smallest = words.counted(min(len(it.block) for it in good), "layer")
        title = (
            f"{len(good):,} of {words.counted(num_smaller, 'smaller block')} "
            f"{'stays' if len(good) == 1 else 'stay'} within {tolerance} of full prefill, "
            f"from {smallest} up"
        )
        shared = derived.in_all(good)
        inside = "the blocks inside the line are good enough, and " + (
            f"all of them recompute {words.layers(shared)}" if shared else "no layer is in them all"
        )
    chosen = derived.recommended_block(profile)
    marked = f"; the star is the recommended {words.span(chosen)}" if chosen else ""
    hatched = (
        f"; hatched are {words.counted(dropped, 'block')} dropped early because others dominate "
        f"{'it' if dropped == 1 else 'them'}"
        if dropped
        else ""
    )
    return Finding(
        title,
        f"From {_smallest(profile)} on the diagonal to all of them in the upper right corner, "
        f"{inside}{marked}{hatched}.",
    )


def _smallest(profile: MeasuredProfile) -> str:
    group = profile.made.group
    return "single layers" if group == 1 else f"groups of {words.counted(group, 'layer')}"


def quality_by_layers(profile: MeasuredProfile) -> Finding:
    num_layers = derived.num_layers(profile)
    found = derived.saving(profile)
    full, reuse = profile.full_prefill_quality, profile.full_reuse_quality
    metric = words.metric_name(profile.metric)
    if found is None:
        return Finding(
            f"No smaller block keeps full prefill's {metric} of {words.quality(full)}",
            f"The frontier (blue) enters the shaded band of the accepted loss only with all "
            f"{num_layers} layers, if at all; reusing all layers reaches {words.quality(reuse)}.",
        )
    kept = words.percent_kept(found.quality / full) if full else words.ABSENT
    other = derived.best_alternative(profile, found.recipe)
    compared = (
        "no alternative was measured at as little compute"
        if other is None
        else f"at no more compute the best alternative ({words.BASELINES[other.kind]}) reaches "
        f"{words.quality_interval(other.quality)}"
    )
    good = found.quality >= profile.quality_floor
    return Finding(
        f"To {words.anew(found.recipe, num_layers)} keeps "
        f"{'' if good else 'only '}{kept} of the held-out {metric}",
        f"The recommended plan {found.recipe} reaches {words.quality(found.quality)}, "
        f"where {words.quality(profile.quality_floor)} is accepted (shaded) and reusing all layers "
        f"gives {words.quality(reuse)}; {compared}.",
    )


def quality_by_time(profile: MeasuredProfile) -> Finding:
    found = derived.saving(profile)
    full_s = derived.full_prefill_s(profile)
    n, m = derived.lengths(profile)
    smaller = [it for it in derived.blocks(profile) if len(it.block) < derived.num_layers(profile)]
    good = [it for it in smaller if it.held_out.mean >= profile.quality_floor]
    seen = (
        f"Better is up and to the left: for prompts of {n:,} + {m:,} tokens on "
        f"{profile.made.device}, {len(good)} of {words.counted(len(smaller), 'smaller block')} of "
        f"the frontier {'reaches' if len(good) == 1 else 'reach'} the accepted "
        f"{words.quality(profile.quality_floor)}"
    )
    if found is None:
        return Finding(
            f"Nothing smaller is recommended: the first token takes {words.seconds(full_s)}",
            f"{seen}.",
        )
    if found.ratio < 1:
        title = (
            f"First token predicted after {words.seconds(found.ttft_s)} in place of "
            f"{words.seconds(full_s)}: {1 / found.ratio:.1f} times sooner"
        )
    else:
        title = (
            f"Reuse saves no time here: {words.seconds(found.ttft_s)} in place of full prefill's "
            f"{words.seconds(full_s)}"
        )
    return Finding(
        title,
        f"{seen}; the recommended one takes {words.percent(found.ratio)} of full prefill's time.",
    )


def train_held_out(profile: MeasuredProfile) -> Finding:
    worst = derived.worst_gap(profile)
    if worst is None:
        return Finding("There is no frontier to compare", "No block was judged on both splits.")
    largest = abs(derived.gap_of(worst))
    chosen = derived.recommended(profile)
    point = derived.point_of(profile, chosen) if chosen else None
    seen = (
        f"The two curves are the same blocks on the questions that chose them and on others; they "
        f"are furthest apart at {words.span(worst.block)} (training "
        f"{words.quality(worst.train_quality)}, held-out {words.quality(worst.held_out.mean)})"
    )
    if point is None:
        return Finding(
            f"Held-out quality is within {words.num_points(largest)} of training everywhere",
            f"{seen}.",
        )
    gap = derived.gap_of(point)
    return Finding(
        f"Held-out quality of {point.recipe} is {words.num_points(abs(gap))} "
        f"{'below' if gap > 0 else 'above'} training; largest gap {words.points(largest)}",
        f"{seen}; the recommended plan's gap is "
        f"{'within' if abs(gap) <= PAPER_GAP else 'beyond'} the {words.num_points(PAPER_GAP)} of "
        f"the paper's worst pair.",
    )


def cost_model(profile: MeasuredProfile) -> Finding:
    errors = derived.time_errors(profile)
    costs, (_, suffix) = profile.costs, derived.lengths(profile)
    longest = derived.longest_prefix(profile)
    title = (
        f"Predicted times are off by {words.percent(profile.costs.error)} in the median, "
        f"{words.percent(max(errors))} at most"
        if errors
        else "The cost model was not checked at other lengths than it was fitted on"
    )
    chosen = derived.recommended(profile)
    full_s = costs.full_prefill_s(longest, suffix)
    at_length = (
        f"reusing all layers would take {words.seconds(costs.ttft_s((), longest, suffix))}"
        if chosen is None
        else f"the recommended plan takes "
        f"{words.seconds(costs.ttft_s(chosen.runs, longest, suffix))}"
    )
    checked = (
        "left, points on the line are predicted exactly, at lengths that were not fitted; right, "
        if errors
        else ""
    )
    sentence = f"{checked}at {longest:,} tokens of prefix {at_length} in place of "
    return Finding(title, f"{sentence[0].upper()}{sentence[1:]}{words.seconds(full_s)}.")
