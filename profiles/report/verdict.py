"""What a profile comes to, in sentences: the gate, what it saves, what needs no gate."""

from __future__ import annotations

from cachetree.evidence import MeasuredProfile
from profiles.report import derived, words


def verdict(profile: MeasuredProfile) -> str:
    return "passed" if profile.passed else "failed"


def recommendation(profile: MeasuredProfile) -> str:
    """What to recompute, and what that keeps and saves."""
    found = derived.saving(profile)
    if found is None:
        return "No block smaller than all layers is recommended, so every prompt is a full prefill."
    anew = words.anew(found.recipe, derived.num_layers(profile))
    point = derived.point_of(profile, found.recipe)
    quality = words.quality_interval(point.held_out) if point else words.quality(found.quality)
    return (
        f"{anew.capitalize()}: {found.recipe}. Held-out {words.metric_name(profile.metric)} is "
        f"{quality} where full prefill has "
        f"{words.quality(profile.full_prefill_quality)} and full reuse "
        f"{words.quality(profile.full_reuse_quality)}. {saved_time(profile)}"
    )


def saved_time(profile: MeasuredProfile) -> str:
    """Empty where nothing is recommended."""
    found = derived.saving(profile)
    if found is None:
        return ""
    n, m = derived.lengths(profile)
    times = f"{words.seconds(found.ttft_s)} in place of {words.seconds(found.full_prefill_s)}"
    faster = f"{1 / found.ratio:.1f} times sooner" if found.ratio < 1 else "no time is saved"
    return f"Predicted TTFT for {n:,} + {m:,} tokens is {times}: {faster}."


def free(profile: MeasuredProfile) -> str:
    """What is exact because the two models do not differ there."""
    num_layers = derived.num_layers(profile)
    first = min(profile.first_difference, num_layers)
    if first == 0:
        return "Nothing is lossless for free: the models differ from layer 0 on."
    if first == num_layers:
        return (
            f"All {num_layers} layers are bit-identical in the two models: reusing all KV is "
            "lossless, whatever the gate says."
        )
    return (
        f"{words.layers(range(first)).capitalize()} "
        f"{'is' if first == 1 else 'are'} bit-identical in the two models, so recomputing "
        f"[{first}, {num_layers}) and reusing what is below is lossless, whatever the gate says."
    )


def cost_error(profile: MeasuredProfile) -> str:
    """How far TTFTs can be trusted."""
    errors = derived.time_errors(profile)
    if not errors:
        return "The cost model was not checked at lengths other than those it was fitted on."
    return (
        f"The cost model is off by {words.percent(profile.costs.error)} in the median and "
        f"{words.percent(max(errors))} at most, over {words.counted(len(errors), 'plan')} at "
        "lengths that it was not fitted on."
    )
