"""The page: one HTML text with everything in it. Every text of the profile is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cachetree.evidence import MeasuredProfile
from profiles.report import derived, tables, words
from profiles.report.stylesheet import STYLESHEET
from profiles.report.tables import Table
from profiles.report.verdict import cost_error, free, recommendation, verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture on the page."""

    topic: str
    title: str
    sentence: str
    source: str
    """A data URI."""


def page(profile: MeasuredProfile, pictures: Sequence[Shown]) -> str:
    """The whole document. It loads nothing: pictures are in it, and it has no scripts."""
    word = verdict(profile)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            '<meta name="color-scheme" content="light dark">',
            f"<title>Pair profile: {word}</title>",
            f"<style>{STYLESHEET}</style>",
            "</head>",
            "<body>",
            "<main>",
            _verdict(profile, word),
            _section("Models", _table(tables.identities(profile))),
            _section(
                "Frontier",
                _paragraph(
                    "Each row is a block [first, end) of layers that the receiver recomputes, end "
                    "not included, while it loads the sender's KV for the others; refreshed layers "
                    "get K and V from the sender's residual stream there, without attention. No "
                    "plan of its kind at as little work or less is as good on the training "
                    "questions. Work is compute in layers; TTFT has what is moved, KV and E in "
                    "per cent of all KV, loaded from elsewhere; in one pool nothing is moved."
                ),
                _table(tables.frontier(profile)),
            ),
            _section("Tasks", _table(tables.tasks(profile))),
            _section("What one could do instead", _table(tables.baselines(profile))),
            _section("Pictures", *map(_picture, pictures)),
            _section("Data", _table(tables.data(profile))),
            _section("Cost model", _paragraph(cost_error(profile)), _table(tables.costs(profile))),
            _section("How it was made", _table(tables.making(profile))),
            "</main>",
            "</body>",
            "</html>",
            "",
        )
    )


def _verdict(profile: MeasuredProfile, word: str) -> str:
    return "\n".join(
        (
            f'<header class="{word}">',
            "<p>Pair profile: may this receiver reuse this sender's KV cache?</p>",
            f"<h1>{'Passed' if profile.passed else 'Failed'}</h1>",
            f'<p class="reason">{escape(profile.reason)}</p>',
            _facts(profile),
            _paragraph(recommendation(profile)),
            _paragraph(free(profile)),
            "</header>",
        )
    )


def _facts(profile: MeasuredProfile) -> str:
    """The few numbers that a reader wants first."""
    found = derived.saving(profile)
    full = words.quality(profile.full_prefill_quality)
    metric = f"held-out {words.metric_name(profile.metric)}"
    if found is None:
        facts = [
            ("recommended plan", "none"),
            (f"{metric}, full prefill", full),
            (f"{metric}, full reuse", words.quality(profile.full_reuse_quality)),
        ]
    else:
        facts = [
            (
                "recommended plan",
                str(found.recipe),
            ),
            (
                "layers recomputed",
                f"{len(found.recipe.block)} of {derived.num_layers(profile)}",
            ),
            (f"{metric} (full prefill {full})", words.quality(found.quality)),
            ("of full prefill's TTFT, predicted", words.percent(found.ratio)),
        ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    return f"<dl>{items}</dl>"


def _section(title: str, *parts: str) -> str:
    return "\n".join(("<section>", f"<h2>{escape(title)}</h2>", *parts, "</section>"))


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _picture(it: Shown) -> str:
    return "\n".join(
        (
            "<figure>",
            f"<h3>{escape(it.topic)}</h3>",
            f'<div class="wide"><img alt="{escape(it.title)}" src="{escape(it.source)}"></div>',
            f"<figcaption>{escape(it.sentence)}</figcaption>",
            "</figure>",
        )
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(it)}</th>' for it in table.headers)
    rows = "\n".join(
        _row(row, place in table.marked, bool(table.marked)) for place, row in enumerate(table.rows)
    )
    kind = "prose" if table.is_prose else "numbers"
    caption = f"<p><small>{escape(table.caption)}</small></p>" if table.caption else ""
    return "\n".join(
        (
            f'<div class="wide"><table class="{kind}">',
            f"<thead><tr>{head}</tr></thead>" if any(table.headers) else "",
            f"<tbody>\n{rows}\n</tbody>",
            f"</table></div>{caption}",
        )
    )


def _row(row: Sequence[str], marked: bool, has_marks: bool) -> str:
    sign = ("* " if marked else "") if has_marks else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
    kind = ' class="marked"' if marked else ""
    return f'<tr{kind}><th scope="row">{sign}{escape(row[0])}</th>{cells}</tr>'
