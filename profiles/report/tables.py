"""Tables of a profile, as text in rows, which terminals and pages draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil
from typing import Any, Final, TypeVar

from profiles.evidence import (
    DataFile,
    FrontierPoint,
    MeasuredProfile,
    Split,
    TaskLoss,
    TaskScores,
)
from profiles.report import derived, words
from profiles.stats.gate import ERROR_RATE

NO_CONTROLS: Final = "not measured: whether the questions need their documents is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    headers: tuple[str, ...]
    """Headers of the columns. The first column names the row; the others are numbers unless
    `is_prose`."""
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    """Indices of the rows that the table marks."""
    caption: str = ""
    is_prose: bool = False

    def without(self, *headers: str) -> Table:
        """Return the table without some of its columns."""
        places = [place for place, header in enumerate(self.headers) if header not in headers]
        lines = [tuple(row[place] for place in places) for row in (self.headers, *self.rows)]
        return replace(self, headers=lines[0], rows=tuple(lines[1:]))


Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]
"""Columns by header. Each has a function that makes the text of a cell from its row."""


def table(title: str, rows: Iterable[Row], columns: Columns[Row], **rest: Any) -> Table:
    cells = tuple(tuple(say(row) for say in columns.values()) for row in rows)
    return Table(title=title, headers=tuple(columns), rows=cells, **rest)


def facts(title: str, said: Mapping[str, str]) -> Table:
    return Table(title=title, headers=("", ""), rows=tuple(said.items()), is_prose=True)


def summary(profile: MeasuredProfile) -> Table:
    """Table of the few most important numbers."""
    plan, split, free = derived.recommended(profile), profile.held_out, profile.lossless
    metric = f"held-out {words.metric_name(profile.metric)}"
    named = words.plan(plan) if plan else "none: every prompt is a full prefill"
    said = {"recommended plan": named}
    if plan is not None:
        said["recomputed layers"] = f"{len(plan.block)} of {profile.receiver.num_layers}"
        said[f"{metric}, the plan"] = words.quality(plan.held_out.mean)
    said[f"{metric}, full prefill"] = words.quality(split.full_prefill.mean)
    said[f"{metric}, full reuse"] = words.quality(split.full_reuse.mean)
    if plan is not None:
        full_s, (n, m) = derived.full_prefill_s(profile), profile.held_out.mean_lengths
        share = words.percent(derived.ttft_ratio(profile, plan.ttft_s))
        said[f"predicted TTFT for {n:,} + {m:,} tokens"] = (
            f"{words.seconds(plan.ttft_s)}, {share} of full prefill's {words.seconds(full_s)}"
        )
    if (tokens := profile.measured_tokens) is not None:
        said["used for prompts of"] = (
            f"up to {tokens:,} tokens, question included; what was proven is the mean over all "
            "lengths"
        )
    said["controls"] = profile.controls or NO_CONTROLS
    # Below the block, the models' tensors are the same.
    reusing = "nothing" if free is None else "reusing all layers"
    said["lossless whatever the gate says"] = f"recomputing {words.span(free)}" if free else reusing
    said["error of predicted times"] = _errors(profile)
    return facts("", said)


def _errors(profile: MeasuredProfile) -> str:
    if not (errors := profile.costs.errors):
        return "not checked"
    middle, most = words.percent(profile.costs.error), words.percent(max(errors))
    return f"{middle} in the median and {most} at most, over {len(errors)} plans"


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
    return table(
        "Frontier",
        profile.frontier,
        columns,
        marked=marked,
        caption=(
            "[first, end): layers that the receiver recomputes, while it loads the sender's KV for "
            "the others. At most: share of full prefill's quality that is lost with "
            f"{words.percent(1 - ERROR_RATE)} confidence, at the task least sure, where the gate "
            f"may ask; the other plans were measured on {derived.shown_on(profile)}. Moved: KV and "
            "E in per cent of all KV, where they come from elsewhere, as TTFT expects. Served: "
            "what a server may use" + ("; * recommended" if marked else "")
        ),
    )


def tasks(profile: MeasuredProfile) -> Table:
    """Show the result of the recommended plan at each task. Without a recommended plan, show the
    plan that came closest."""
    plan = derived.judged(profile)
    named = words.plan(plan) if plan else "none was judged"
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
    return table(
        "Tasks",
        zip_longest(profile.held_out.tasks, plan.tasks if plan else ()),
        columns,
        caption=(
            f"held-out; plan: {named}; at most: share of full prefill's quality that it loses with "
            f"{words.percent(1 - ERROR_RATE)} confidence at most; "
            f"{words.stated_percent(profile.tolerance)} is accepted at every task"
        ),
    )


def baselines(profile: MeasuredProfile) -> Table:
    """Show the baselines, below full prefill, full reuse and the sender's answers."""

    def known(value: Row | None, say: Callable[[Row], str]) -> str:
        return words.ABSENT if value is None else say(value)

    def of_full(ttft_s: float) -> str:
        return words.percent(derived.ttft_ratio(profile, ttft_s))

    columns: Columns[derived.Way] = {
        "method": lambda it: it.name,
        "layers": lambda it: known(it.layers, lambda number: f"{number:.3g}"),
        "runs": lambda it: words.runs(it.runs),
        "held-out [95 %]": lambda it: words.quality_interval(it.quality),
        "loss": lambda it: known(it.full, lambda full: words.points(full - it.quality.mean)),
        "KL": lambda it: known(it.fidelity, lambda found: words.small(found.kl)),
        "TTFT": lambda it: known(it.ttft_s, words.seconds),
        "of full": lambda it: known(it.ttft_s, of_full),
    }
    caption = (
        "layers: compute, in layers of the receiver; loss: in points, from full prefill on the "
        "same questions, where that is known; recomputes of a part were measured on "
        f"{derived.shown_on(profile)}"
    )
    return table("What one could do instead", derived.ways(profile), columns, caption=caption)


def identities(profile: MeasuredProfile, digest_characters: int | None = None) -> Table:
    """Make the table of both models' identities, one row for each field. Digests are cut to
    `digest_characters`, if it is not None."""
    rows = []
    for field in ("model_id", *profile.sender.__struct_fields__):
        most = digest_characters if field in ("model_id", "tokenizer", "weights") else None
        sides = (str(getattr(it, field))[:most] for it in (profile.sender, profile.receiver))
        rows.append((field, *sides))
    return Table(
        title="Models",
        headers=(
            "",
            f"sender {profile.sender_name}".rstrip(),
            f"receiver {profile.receiver_name}".rstrip(),
        ),
        rows=tuple(rows),
        marked=frozenset(
            place for place, (_, sender, receiver) in enumerate(rows) if sender != receiver
        ),
        caption="* differs; identities are computed from content, never from names",
        is_prose=True,
    )


def data(profile: MeasuredProfile, digest_characters: int | None = None) -> Table:
    """Show the data of both splits, digests in full or cut to a number of characters."""

    def named(file: DataFile) -> str:
        digest = file.sha256[:digest_characters]
        return f"{file.name} ({words.counted(file.num_questions, 'question')}, sha256 {digest})"

    shown: Mapping[str, Callable[[Split], str]] = {
        "files": lambda it: "; ".join(map(named, it.files)),
        "contexts": lambda it: f"{it.num_contexts:,}",
        "questions": lambda it: f"{it.num_questions:,}",
        "prefix in tokens": lambda it: (
            f"{it.mean_prefix_tokens:,.0f} mean, {it.max_prefix_tokens:,} most"
        ),
        "contexts as long": _reached,
        "suffix in tokens": lambda it: f"{it.mean_suffix_tokens:,.0f} mean",
        "sender alone": lambda it: words.quality_interval(it.sender),
        "full prefill": lambda it: words.quality_interval(it.full_prefill),
        "full reuse": lambda it: words.quality_interval(it.full_reuse),
    }
    return Table(
        title="Data",
        headers=("", "train: chooses", "held-out: judges"),
        rows=tuple(
            (name, say(profile.train), say(profile.held_out)) for name, say in shown.items()
        ),
        caption=(
            f"{words.metric_name(profile.metric)}, 0 to 1, mean over contexts, of which each counts"
            " as the mean over its questions, with its 95 % interval"
        ),
        is_prose=True,
    )


def _reached(split: Split) -> str:
    """Say how many contexts reach each quarter of the longest prefix."""
    lengths = [ceil(split.max_prefix_tokens * it / 4) for it in range(1, 5)]
    counts = [sum(of >= it for of in split.prefix_tokens) for it in lengths]
    said = (f"{count:,} reach {it:,}" for count, it in zip(counts, lengths, strict=True))
    return ", ".join(said) if split.prefix_tokens else words.ABSENT


def making(profile: MeasuredProfile) -> Table:
    made = profile.made
    grid = "every block" if made.group == 1 else f"blocks of a {made.group}-layer grid"
    pruned = "the closest ones decoded" if made.pruned else "all of them decoded"
    passes = (
        f"{made.prefix_passes:,} in all; {made.sweep_passes_per_context:,} for every block of one "
        "training context"
    )
    answers = "answers as long as each data set has them"
    if made.max_new:
        answers = f"answers of at most {words.counted(made.max_new, 'token')}"
    if made.max_prompt_tokens is not None:
        answers += f", prompts of at most {words.counted(made.max_prompt_tokens, 'token')}"
    said = {
        "date": made.date,
        "command": made.command,
        "hardware": f"{made.hardware}; {made.device}, {made.dtype}",
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
        "blocks": f"{grid}, {pruned}",
        "prefix passes": passes,
        "time": words.duration(made.elapsed_s),
        "template": made.template,
        "chat template": "the tokenizer's own" if made.chat else "none",
        "settings": f"seed {made.seed}, pages of {words.counted(made.page_size, 'token')}, "
        + answers,
        "data": f"sha256 {profile.data_sha256}",
    }
    return facts("How it was made", said)
