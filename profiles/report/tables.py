"""Tables of a profile, as text in rows; terminals and pages draw the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, TypeVar

from cachetree import Span
from cachetree.planning import BEYOND
from profiles.evidence import (
    FrontierPoint,
    Interval,
    MeasuredProfile,
    Split,
    TaskLoss,
    TaskScores,
)
from profiles.report import derived, words
from profiles.stats.gate import ERROR_RATE

DIGEST_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    headers: tuple[str, ...]
    """The first column names the row; the others are numbers unless `is_prose`."""
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    """Places of the rows to point out."""
    caption: str = ""
    is_prose: bool = False

    def without(self, *headers: str) -> Table:
        """The same table with fewer columns."""
        kept = [place for place, header in enumerate(self.headers) if header not in headers]
        lines = [tuple(row[place] for place in kept) for row in (self.headers, *self.rows)]
        return replace(self, headers=lines[0], rows=tuple(lines[1:]))


Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]
"""What a cell says of its row, by the column's header."""


def _table(title: str, rows: Iterable[Row], columns: Columns[Row], **rest: Any) -> Table:
    cells = tuple(tuple(say(row) for say in columns.values()) for row in rows)
    return Table(title=title, headers=tuple(columns), rows=cells, **rest)


def summary(profile: MeasuredProfile) -> Table:
    """The few numbers that a reader wants first."""
    plan, split = derived.recommended(profile), profile.held_out
    full = split.full_prefill
    metric = f"held-out {words.metric_name(profile.metric)}"
    rows = [
        (
            "recommended plan",
            words.span(plan.block) if plan else "none: every prompt is a full prefill",
        ),
        (f"{metric}, full prefill", words.quality(full.mean)),
        (f"{metric}, full reuse", words.quality(split.full_reuse.mean)),
    ]
    if plan is not None:
        full_s, (n, m) = derived.full_prefill_s(profile), derived.lengths(profile)
        share = words.percent(derived.ttft_ratio(profile, plan.ttft_s))
        rows[1:1] = [
            ("recomputed layers", f"{len(plan.block)} of {profile.receiver.num_layers}"),
            (f"{metric}, the plan", words.quality(plan.held_out.mean)),
        ]
        rows.append(
            (
                f"predicted TTFT for {n:,} + {m:,} tokens",
                f"{words.seconds(plan.ttft_s)}, {share} of full prefill's {words.seconds(full_s)}",
            )
        )
    if profile.measured_tokens is not None:
        served = f"{profile.measured_tokens:,}, so servers use it up to {BEYOND} times as many"
        rows.append(("longest prefix measured, in tokens", served))
    rows.append(("lossless whatever the gate says", _free(profile.lossless)))
    rows.append(("error of predicted times", _errors(profile)))
    return Table(title="", headers=("", ""), rows=tuple(rows), is_prose=True)


def _free(block: Span | None) -> str:
    """Below the block, the models' tensors are the same."""
    if block is None:
        return "nothing"
    return f"recomputing {words.span(block)}" if len(block) else "reusing all layers"


def _errors(profile: MeasuredProfile) -> str:
    found = profile.costs.errors
    if not found:
        return "not checked"
    middle, most = words.percent(profile.costs.error), words.percent(max(found))
    return f"{middle} in the median and {most} at most, over {len(found)} plans"


def frontier(profile: MeasuredProfile) -> Table:
    usable = {(it.block, it.e_map) for it in profile.blocks}
    plan = derived.recommended(profile)
    marked = frozenset(place for place, it in enumerate(profile.frontier) if it is plan)
    columns: Columns[FrontierPoint] = {
        "plan": words.plan,
        "layers": lambda it: str(len(it.block)),
        "train": lambda it: words.quality(it.train_quality),
        "held-out [95 %]": lambda it: words.quality_interval(it.held_out),
        "at most": words.bound,
        "KL": lambda it: words.small(it.fidelity.kl),
        "moved": lambda it: words.percent(derived.moved_share(profile, it.block)),
        "TTFT": lambda it: words.seconds(it.ttft_s),
        "of full": lambda it: words.percent(derived.ttft_ratio(profile, it.ttft_s)),
        "served": lambda it: "yes" if (it.block, it.e_map) in usable else "no",
    }
    return _table(
        "Frontier",
        profile.frontier,
        columns,
        marked=marked,
        caption=(
            "[first, end): layers that the receiver recomputes, while it loads the sender's KV for "
            "the others. At most: share of full prefill's quality that is lost with "
            f"{words.percent(1 - ERROR_RATE)} confidence, at the task least sure, where the gate "
            "may ask. Moved: KV and E in per cent of all KV, where they come from elsewhere, as "
            "TTFT expects. Served: what a server may use" + ("; * recommended" if marked else "")
        ),
    )


def tasks(profile: MeasuredProfile) -> Table:
    """The gate asks every task: what is known about the recommended plan, or the one that came
    closest."""
    plan = derived.judged(profile)
    named = words.span(plan.block) if plan else "none was judged"
    columns: Columns[tuple[TaskScores, TaskLoss | None]] = {
        "task": lambda it: it[0].name or words.ABSENT,
        "metric": lambda it: words.metric_name(it[0].metric),
        "contexts": lambda it: f"{it[0].num_contexts:,}",
        "questions": lambda it: f"{it[0].num_questions:,}",
        "sender": lambda it: words.quality(it[0].sender),
        "full reuse": lambda it: words.quality(it[0].full_reuse),
        "full prefill": lambda it: words.quality(it[0].full_prefill),
        "plan": lambda it: words.quality(it[1].quality) if it[1] else words.ABSENT,
        "at most": lambda it: words.percent_kept(it[1].bound) if it[1] else words.ABSENT,
        "passed": lambda it: "yes" if it[1] and it[1].bound <= profile.tolerance else "no",
    }
    return _table(
        "Tasks",
        zip_longest(profile.held_out.tasks, plan.tasks if plan else ()),
        columns,
        caption=(
            f"held-out; plan: {named}; at most: share of full prefill's quality that it loses with "
            f"{words.percent(1 - ERROR_RATE)} confidence at most; "
            f"{words.percent(profile.tolerance)} is accepted at every task"
        ),
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to answer, as a row."""

    name: str
    layers: str
    quality: Interval
    ttft_s: float | None
    runs: str = words.ABSENT
    kl: str = words.ABSENT


def baselines(profile: MeasuredProfile) -> Table:
    """What one could do instead, after what bounds it: full prefill, full reuse, the sender."""
    split, num_layers = profile.held_out, profile.receiver.num_layers
    ways = [
        _Way("full prefill", str(num_layers), split.full_prefill, derived.full_prefill_s(profile)),
        _Way("full reuse", "0", split.full_reuse, derived.full_reuse_s(profile)),
        _Way("sender alone", words.ABSENT, split.sender, None),
    ]
    for it in profile.baselines:
        kl = words.ABSENT if it.fidelity is None else words.small(it.fidelity.kl)
        layers, runs = f"{it.recomputed_layers:.3g}", words.runs(it.runs)
        ways.append(_Way(words.baseline(it), layers, it.quality, it.ttft_s, runs, kl))

    def timed(way: _Way, say: Callable[[float], str]) -> str:
        return words.ABSENT if way.ttft_s is None else say(way.ttft_s)

    columns: Columns[_Way] = {
        "method": lambda it: it.name,
        "layers": lambda it: it.layers,
        "runs": lambda it: it.runs,
        "held-out [95 %]": lambda it: words.quality_interval(it.quality),
        "loss": lambda it: words.points(split.full_prefill.mean - it.quality.mean),
        "KL": lambda it: it.kl,
        "TTFT": lambda it: timed(it, words.seconds),
        "of full": lambda it: timed(it, lambda s: words.percent(derived.ttft_ratio(profile, s))),
    }
    caption = "layers: compute, in layers of the receiver; loss: in points, as above"
    return _table("What one could do instead", ways, columns, caption=caption)


def identities(profile: MeasuredProfile, digest_characters: int = DIGEST_CHARACTERS) -> Table:
    """Every field of both models; digests are cut to `digest_characters`."""
    sides = (profile.sender, profile.receiver)
    digests = ("tokenizer", "weights")
    rows = [("model_id", *(str(it.model_id)[:digest_characters] for it in sides))]
    for field in profile.sender.__struct_fields__:
        values = [str(getattr(it, field)) for it in sides]
        shown = [value[:digest_characters] if field in digests else value for value in values]
        rows.append((field, *shown))
    return Table(
        title="Models",
        headers=("", "sender", "receiver"),
        rows=tuple(rows),
        marked=frozenset(
            place for place, (name, sender, receiver) in enumerate(rows) if sender != receiver
        ),
        caption="* differs; identities are computed from content, never from names",
        is_prose=True,
    )


def data(profile: MeasuredProfile, digest_characters: int = DIGEST_CHARACTERS) -> Table:
    """Both splits; digests are cut to `digest_characters`."""
    rows = [
        ("files", *(_files(it, digest_characters) for it in (profile.train, profile.held_out))),
        *(
            (name, show(profile.train), show(profile.held_out))
            for name, show in (
                ("contexts", lambda it: f"{it.num_contexts:,}"),
                ("questions", lambda it: f"{it.num_questions:,}"),
                (
                    "prefix in tokens",
                    lambda it: f"{it.mean_prefix_tokens:,.0f} mean, {it.max_prefix_tokens:,} most",
                ),
                ("suffix in tokens", lambda it: f"{it.mean_suffix_tokens:,.0f} mean"),
                ("sender alone", lambda it: words.quality_interval(it.sender)),
                ("full prefill", lambda it: words.quality_interval(it.full_prefill)),
                ("full reuse", lambda it: words.quality_interval(it.full_reuse)),
            )
        ),
    ]
    return Table(
        title="Data",
        headers=("", "train: chooses", "held-out: judges"),
        rows=tuple(rows),
        caption=(
            f"{words.metric_name(profile.metric)}, 0 to 1, mean over questions with its 95 % "
            "interval over contexts"
        ),
        is_prose=True,
    )


def _files(split: Split, digest_characters: int) -> str:
    return "; ".join(
        f"{it.name} ({words.counted(it.num_questions, 'question')}, "
        f"sha256 {it.sha256[:digest_characters]})"
        for it in split.files
    )


def making(profile: MeasuredProfile) -> Table:
    made = profile.made
    grid = "every block" if made.group == 1 else f"blocks of a {made.group}-layer grid"
    pruned = "the closest ones decoded" if made.pruned else "all of them decoded"
    rows: Sequence[tuple[str, str]] = (
        ("date", made.date),
        ("command", made.command),
        ("hardware", f"{made.hardware}; {made.device}, {made.dtype}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("blocks", f"{grid}, {pruned}"),
        (
            "prefix passes",
            f"{made.prefix_passes:,} in all; {made.sweep_passes_per_context:,} for every block of "
            "one training context",
        ),
        ("time", words.duration(made.elapsed_s)),
        ("template", made.template),
        ("chat template", "the tokenizer's own" if made.chat else "none"),
        (
            "settings",
            f"seed {made.seed}, pages of {words.counted(made.page_size, 'token')}, answers of at "
            f"most {words.counted(made.max_new, 'token')}",
        ),
        ("data", f"sha256 {profile.data_sha256}"),
    )
    return Table(title="How it was made", headers=("", ""), rows=tuple(rows), is_prose=True)
