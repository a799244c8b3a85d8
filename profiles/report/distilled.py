"""The page of an adapter that was distilled."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from profiles.distill.evidence import Distilled, JudgedTask
from profiles.report import words
from profiles.report.page import TEMPLATES
from profiles.report.tables import Table, facts, table

EVIDENCE: Final = "distilled.json"
PAGE: Final = "report.html"
_VERDICTS: Final = {True: "Passed", False: "Failed", None: "Not compared"}


def write_page(found: Distilled, folder: Path) -> None:
    """Write what is known, as JSON and as a page, beside the adapter."""
    (folder / EVIDENCE).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    page = TEMPLATES.get_template("distilled.html.jinja").render(
        found=found,
        verdict=_VERDICTS[found.passed],
        judged=(tasks(found), curve(found)),
        made=made(found),
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def tasks(found: Distilled) -> Table:
    """The adapter beside its teacher, by data set."""
    return table(
        "Held-out questions",
        found.tasks,
        {
            "data set": lambda it: it.name,
            "metric": lambda it: words.metric_name(it.metric),
            "contexts": lambda it: str(it.num_contexts),
            "questions": lambda it: str(it.num_questions),
            "teacher": _teacher,
            "adapter": lambda it: words.quality_interval(it.student),
            "loses at most": lambda it: words.stated_percent(it.loss.bound) if it.loss else "–",
            "same answer": lambda it: _of(it.agreement),
            "KL": lambda it: _of(it.kl),
        },
        caption="The teacher reads the whole prompt itself, and the adapter the base's KV up to "
        "its invocation. Intervals are of 95 %, by context.",
    )


def curve(found: Distilled) -> Table:
    """Quality, agreement and KL by steps."""
    return table(
        f"The first {found.num_shown} held-out contexts, by steps",
        found.curve,
        {
            "steps": lambda it: str(it.step),
            "quality": lambda it: _of(it.quality),
            "same answer": lambda it: _of(it.agreement),
            "KL": lambda it: _of(it.kl),
        },
        caption="Step 0 is the adapter as it begins; if its teacher is a LoRA, that one activated "
        "at the invocation, without training.",
    )


def made(found: Distilled) -> Table:
    """How the adapter was made."""
    tokens = ", ".join(map(str, found.invocation_tokens))
    return facts(
        "How it was made",
        {
            "base": found.base,
            "teacher": found.teacher or "–",
            "learned from": found.learned_from,
            "invocation": f"{found.invocation!r}, tokens {tokens}",
            "learned": f"{words.counted(found.num_questions, 'question')} about "
            f"{words.counted(found.num_contexts, 'context')} in {found.steps} steps, "
            f"rank {found.rank}",
            "command": found.command,
            "versions": ", ".join(f"{name} {it}" for name, it in found.versions.items()),
            "date": found.date,
        },
    )


def _teacher(it: JudgedTask) -> str:
    return "–" if it.teacher is None else words.quality_interval(it.teacher)


def _of(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
