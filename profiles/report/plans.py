"""Several profiles side by side: what each kind of plan keeps of the quality, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cachetree.evidence import FrontierPoint, Interval, MeasuredProfile
from cachetree.ids import Span
from cachetree.planning.profile import Recipe
from profiles.gate import ERROR_RATE, is_within
from profiles.report import derived, words
from profiles.report.tables import Table

BLOCK, REFRESHED, BOTH = "block", "refreshed", "block and refreshed"
KINDS: Final = (REFRESHED, BLOCK, BOTH)

Profiles = Mapping[str, MeasuredProfile]
"""By a name for people."""


def kind_of(recipe: Recipe) -> str:
    if not recipe.refreshed:
        return BLOCK
    return BOTH if len(recipe.block) else REFRESHED


def points_of(profile: MeasuredProfile, kind: str) -> list[FrontierPoint]:
    """By work; without the block of all layers, which reuses nothing."""
    whole = derived.num_layers(profile)
    found = (it for it in profile.frontier if kind_of(it.recipe) == kind)
    return [it for it in found if len(it.block) < whole]


def is_accepted(profile: MeasuredProfile, point: FrontierPoint) -> bool:
    """Whether, judged for itself, it loses no more than the tolerance with confidence."""
    return is_within(point, profile.tolerance)


def representative(profile: MeasuredProfile, kind: str) -> FrontierPoint | None:
    """What is recommended if it is of this kind; else the accepted plan that takes the least work;
    where there is none, the one that was best on the training split."""
    points = points_of(profile, kind)
    chosen = [it for it in points if it.recipe == derived.recommended(profile)]
    accepted = [it for it in points if is_accepted(profile, it)]
    best = max(points, key=lambda it: it.train_quality, default=None)
    return next(iter([*chosen, *accepted]), best)


def full_prefill_work(profile: MeasuredProfile) -> float:
    return Recipe(block=Span(0, derived.num_layers(profile))).work


def plans(profiles: Profiles) -> Table:
    """A row for each kind of plan of each pair, between what bounds it."""
    rows: list[tuple[str, ...]] = []
    marked = []
    for name, profile in profiles.items():
        held_out = profile.held_out
        no_plan = (Recipe(), held_out.full_reuse)
        rows.append((name, "full reuse", *_cost(profile, no_plan[0]), *_found(no_plan[1])))
        for kind in KINDS:
            point = representative(profile, kind)
            if point is None:
                continue
            if point.recipe == derived.recommended(profile):
                marked.append(len(rows))
            rows.append(
                (
                    "",
                    str(point.recipe),
                    *_cost(profile, point.recipe),
                    words.quality_interval(point.held_out),
                    words.bound(point),
                    "yes" if is_accepted(profile, point) else "no",
                )
            )
        work = f"{full_prefill_work(profile):.1f}"
        rows.append(("", "full prefill", work, words.percent(0.0), *_found(held_out.full_prefill)))
    return Table(
        title="Kinds of plans",
        headers=("pair", "plan", "work", "moved", "held-out [95 %]", "loss at most", "accepted"),
        rows=tuple(rows),
        marked=frozenset(marked),
        caption=(
            "work: compute in layers; moved: bytes of KV and E, of all KV, where sender and "
            "receiver share no pool; loss at most: share of full prefill's quality, with "
            f"{words.percent(1 - ERROR_RATE)} confidence. Of each kind: what is recommended, else "
            "the accepted plan that takes the least work, else the best on the training split"
        ),
    )


def finding(profiles: Profiles) -> str:
    """What the pairs have in common, in one sentence computed from them."""
    counts = {
        kind: sum(
            any(is_accepted(it, point) for point in points_of(it, kind)) for it in profiles.values()
        )
        for kind in KINDS
    }
    passed = [it for it in profiles.values() if it.passed]
    lost = [
        1 - it.recommended.quality / it.full_prefill_quality
        for it in passed
        if it.recommended is not None
    ]
    total = words.counted(len(profiles), "pair")
    worst = ""
    if lost:
        worst = f"; the plans that they recommend lost up to {words.percent_kept(max(lost))}"
    return (
        f"{len(passed)} of {total} passed{worst}. Within the tolerance: a block in "
        f"{counts[BLOCK]}, a block with refreshed layers in {counts[BOTH]}, refreshed layers alone "
        f"in {counts[REFRESHED]} of {total}"
    )


def markdown(profiles: Profiles) -> str:
    """The table and the finding, for a README."""
    table = plans(profiles)
    lines = [f"| {' | '.join(table.headers)} |", f"|{'---|' * len(table.headers)}"]
    for place, row in enumerate(table.rows):
        cells = [f"**{it}**" if place in table.marked and it else it for it in row]
        lines.append(f"| {' | '.join(cells)} |")
    caption = f"{table.caption}; bold: what is recommended."
    return "\n".join([*lines, "", caption, "", f"{finding(profiles)}.", ""])


def _cost(profile: MeasuredProfile, recipe: Recipe) -> tuple[str, str]:
    return f"{recipe.work:.1f}", words.percent(derived.moved_share(profile, recipe))


def _found(quality: Interval) -> tuple[str, str, str]:
    return words.quality_interval(quality), words.ABSENT, words.ABSENT
