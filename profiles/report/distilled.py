"""The page of a distilled adapter."""

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


def write_page(distilled: Distilled, folder: Path) -> None:
    """Write the evidence about an adapter into the adapter's folder, as JSON and as a page."""
    (folder / EVIDENCE).write_bytes(msgspec.json.format(msgspec.json.encode(distilled)) + b"\n")
    page = TEMPLATES.get_template("distilled.html.jinja").render(
        found=distilled,
        verdict=_VERDICTS[distilled.passed],
        judged=(tasks(distilled), curve(distilled)),
        made=made(distilled),
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def tasks(distilled: Distilled) -> Table:
    """Compare the adapter with its teacher on each data set."""
    return table(
        "Held-out questions",
        distilled.tasks,
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


def curve(distilled: Distilled) -> Table:
    """Quality, agreement and KL at each point (training step) of the learning curve."""
    return table(
        f"The first {distilled.num_shown} held-out contexts, by steps",
        distilled.curve,
        {
            "steps": lambda it: str(it.step),
            "quality": lambda it: _of(it.quality),
            "same answer": lambda it: _of(it.agreement),
            "KL": lambda it: _of(it.kl),
        },
        caption="Step 0 is the adapter as it begins; if its teacher is a LoRA, that one activated "
        "at the invocation, without training.",
    )


def made(distilled: Distilled) -> Table:
    """How the adapter was made."""
    tokens = ", ".join(map(str, distilled.invocation_tokens))
    return facts(
        "How it was made",
        {
            "base": distilled.base,
            "teacher": distilled.teacher or "–",
            "learned from": distilled.learned_from,
            "invocation": f"{distilled.invocation!r}, tokens {tokens}",
            "learned": f"{words.counted(distilled.num_questions, 'question')} about "
            f"{words.counted(distilled.num_contexts, 'context')} in {distilled.steps} steps, "
            f"rank {distilled.rank}",
            "command": distilled.command,
            "versions": ", ".join(f"{name} {it}" for name, it in distilled.versions.items()),
            "date": distilled.date,
        },
    )


def _teacher(task: JudgedTask) -> str:
    return "–" if task.teacher is None else words.quality_interval(task.teacher)


def _of(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
