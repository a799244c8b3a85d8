"""Write the parts of the pages that the code itself says: `python -m tools.reference`.

A part stands between `<!-- made: NAME -->` and `<!-- end -->`; the rest of a page is written by
hand. A test makes every part again and compares.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import Counter, Histogram

from cachetree.cli import parser as cachetree_parser
from cachetree.metrics import METRICS
from examples import break_even
from sglang_droidspeak.cli import parser as droidspeak_parser
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.controls import Controls
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.start.config import Settings

ROOT: Final = Path(__file__).resolve().parents[1]
_PART: Final = re.compile(r"(<!-- made: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(row) for row in (head, ["---"] * len(head), *rows))
    return "".join(f"| {line} |\n" for line in lines)


def field_docs(struct: type) -> dict[str, str]:
    """What stands under each field; msgspec keeps no docstrings, so the source is asked."""
    (body,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        match node, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def fields_of(struct: type, *, defaults: bool) -> str:
    docs = field_docs(struct)
    rows = (
        [f"`{it.name}`", *([_shown(_default(it))] if defaults else []), docs[it.name]]
        for it in msgspec.structs.fields(struct)
    )
    return table(["key", "default", "meaning"] if defaults else ["field", "meaning"], rows)


def _default(field: msgspec.structs.FieldInfo) -> object:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return f"`{list(value)}`"
        case str() | dict():
            return f"`{getattr(value, 'value', value)}`"
    return str(value)


def request_metrics() -> str:
    """Those of `Metrics`, as they are scraped."""
    rows = []
    for metric in vars(Metrics(enabled=False)).values():
        if isinstance(metric, Counter | Histogram):
            (told,) = metric.describe()
            sample = told.name + "_total" * isinstance(metric, Counter)
            rows.append([_labelled(sample, metric._labelnames), told.type, told.documentation])
    return table(["metric", "kind", "meaning"], rows)


def cache_metrics() -> str:
    rows = ([_labelled(it.sample_name, it.labels), it.kind, it.text] for it in METRICS)
    return table(["metric", "kind", "meaning"], rows)


def _labelled(name: str, labels: Sequence[str]) -> str:
    return f"`{name}{{{', '.join(labels)}}}`" if labels else f"`{name}`"


def commands(parser: argparse.ArgumentParser) -> str:
    return "\n".join(_command(it, text) for it, text in _leaves(parser))


def _leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Each command below a parser, with its one line of help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for told in action._choices_actions:
                below = action.choices[told.dest]
                yield below, told.help or ""
                yield from _leaves(below)


def _command(parser: argparse.ArgumentParser, text: str) -> str:
    told = parser.description or f"{text[0].upper()}{text[1:]}."
    rows = [
        [f"`{_usage(it)}`", _option(it)]
        for it in parser._actions
        if not isinstance(it, argparse._HelpAction | argparse._SubParsersAction)
    ]
    shown = "\n" + table(["argument", "meaning"], rows) if rows else ""
    return f"### {parser.prog}\n\n{told}\n{shown}"


def _usage(action: argparse.Action) -> str:
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    value = "" if action.nargs == 0 else str(value)
    return " ".join([*action.option_strings[-1:], value]).strip()


def _option(action: argparse.Action) -> str:
    told = [action.help] if action.help else []
    if action.choices:
        told.append(f"one of {', '.join(f'`{it}`' for it in action.choices)}")
    if action.default not in (None, False, [], "") and "default" not in (action.help or ""):
        told.append(f"default: {action.default}")
    if action.required and action.option_strings:
        told.append("required")
    return "; ".join(told)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "settings": lambda: fields_of(Settings, defaults=True),
    "controls": lambda: fields_of(Controls, defaults=True),
    "meta_info": lambda: fields_of(RequestProvenance, defaults=False),
    "request_metrics": request_metrics,
    "cache_metrics": cache_metrics,
    "droidspeak": lambda: commands(droidspeak_parser()),
    "cachetree": lambda: commands(cachetree_parser()),
    "break_even": break_even.markdown,
}


def written(page: str) -> str:
    """The page with its parts made anew; raises KeyError for a name that none has."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for path in pages():
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
