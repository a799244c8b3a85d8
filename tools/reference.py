"""Write the parts of the pages that are made from the code, and the pages' pictures:
`python -m tools.reference`.

A part is between `<!-- made: NAME -->` and `<!-- end -->`; people write the rest of a page. A test
makes every part again and compares.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from cachetree.checkpoint import Codec
from cachetree.checkpoint.family import vector_bytes
from cachetree.cli import parser as cachetree_parser
from cachetree.metrics import METRICS
from examples import break_even
from profiles.evidence import read_measured
from profiles.report import derived, words
from sglang_droidspeak.cli import parser as droidspeak_parser
from sglang_droidspeak.demo.config import REAL_PROFILE
from sglang_droidspeak.demo.report import DemoReport, described, hardware
from sglang_droidspeak.demo.results import Condition
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.controls import Controls
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.outcomes import SECTIONS
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.config import HOST, STAGING, MemoryShare, Settings
from tools import pictures, tables
from tools.tables import table

ROOT: Final = Path(__file__).resolve().parents[1]
_NOTHING: Final[tuple[object, ...]] = (None, False, "", "{}", "none", "null", "off", [])
"""Values with which an argument of SGLang is switched off."""
_PART: Final = re.compile(r"(<!-- made: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def field_docs(struct: type) -> dict[str, str]:
    """Return the docstring of each field. We read the source, because msgspec keeps no
    docstrings."""
    (body,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        match node, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def fields_of(
    struct: type, beside: Callable[[msgspec.structs.FieldInfo], str] = lambda field: ""
) -> str:
    """List a struct's fields and docstrings. A table would be too wide for a small screen."""
    docs, fields = field_docs(struct), msgspec.structs.fields(struct)
    return "".join(f"- **`{it.name}`**{beside(it)}: {docs[it.name]}\n" for it in fields)


def _default(field: msgspec.structs.FieldInfo) -> str:
    match field.default_factory:
        case msgspec.NODEFAULT:
            return f" (default {_shown(field.default)})"
        case MemoryShare() as share:
            return f" (default {share})"
        case make:
            return f" (default {_shown(make())})"


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
    """Make a table of the metrics of `Metrics`, under the names that Prometheus reads."""
    rows = []
    for metric in vars(Metrics(enabled=False)).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            (family,) = metric.describe()
            sample = family.name + "_total" * isinstance(metric, Counter)
            rows.append([_labelled(sample, metric._labelnames), family.type, family.documentation])
    return table(["metric", "kind", "meaning"], rows)


def cache_metrics() -> str:
    rows = ([_labelled(it.sample_name, it.labels), it.kind, it.text] for it in METRICS)
    return table(["metric", "kind", "meaning"], rows)


def _labelled(name: str, labels: Sequence[str]) -> str:
    return f"`{name}{{{', '.join(labels)}}}`" if labels else f"`{name}`"


def commands(parser: argparse.ArgumentParser) -> str:
    return "\n".join(_command(it, text) for it, text in _leaves(parser))


def _leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield each command below a parser, with its line of help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                below = action.choices[choice.dest]
                yield below, choice.help or ""
                yield from _leaves(below)


def _command(parser: argparse.ArgumentParser, text: str) -> str:
    description = parser.description or f"{text[0].upper()}{text[1:]}."
    rows = [
        [f"`{_usage(it)}`", _option(it)]
        for it in parser._actions
        if not isinstance(it, argparse._HelpAction | argparse._SubParsersAction)
    ]
    shown = "\n" + table(["argument", "meaning"], rows) if rows else ""
    return f"### {parser.prog}\n\n{description}\n{shown}"


def _usage(action: argparse.Action) -> str:
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    value = "" if action.nargs == 0 else str(value)
    named = [it for it in action.option_strings if it.startswith("--")] or action.option_strings
    return " ".join([*named[:1], value]).strip()


def _option(action: argparse.Action) -> str:
    parts = [action.help] if action.help else []
    if action.choices:
        parts.append(f"one of {', '.join(f'`{it}`' for it in action.choices)}")
    if action.default not in (None, False, [], "") and "default" not in (action.help or ""):
        parts.append(f"default: {action.default}")
    if action.required and action.option_strings:
        parts.append("required")
    return "; ".join(parts)


def proof() -> str:
    """Show the recorded run of `make demo`: quality and time of its pair."""
    run = msgspec.json.decode((ROOT / "benchmarks/results/demo.json").read_bytes(), type=DemoReport)
    pair = run.pair
    ways = {
        "the adapter computes all layers: SGLang alone": Condition.FULL_PREFILL,
        "the adapter loads all layers": Condition.FULL_REUSE,
        "**the adapter computes the block, and loads the rest**": Condition.BLOCK,
        "the aLoRA loads all layers": Condition.ALORA_REUSE,
        "the aLoRA computes all layers: a check": Condition.ALORA_PREFILL,
    }
    rows = []
    for name, way in ways.items():
        if condition := pair.conditions.get(way):
            within = condition.quality_95 and "[{:.2f}, {:.2f}]".format(*condition.quality_95)
            computed = pair.num_layers if way.is_full else round(condition.layers_recomputed)
            quality = f"{condition.quality:.3f} {within or ''}".rstrip()
            rows.append([name, quality, f"{computed} of {pair.num_layers}"])
            rows[-1] += [
                f"{condition.ttft_p50_ms / 1e3:.2f} s",
                f"{condition.ttft_p90_ms / 1e3:.2f} s",
                f"{condition.speedup:.1f} ×",
            ]
    head = ["how the document is read", "quality (95 % interval)", "layers computed"]
    head += ["first word: median", "nine of ten within", "times as fast"]
    text = table(head, rows)
    where = hardware(run.environment)
    text += (
        f"\nOne run with {pair.num_questions} questions; quality by "
        f"{words.metric_name(pair.metric)}. "
        f"Small print: {described(pair)}; {where}.\n"
    )
    profile = read_measured(REAL_PROFILE)
    plan, covered = derived.judged(profile), profile.measured_tokens
    assert plan is not None and (plan.block.start, plan.block.stop) == pair.block, (
        "the recorded run has the pair's plan"
    )
    assert covered is not None and covered < pair.tokens_per_document, (
        "the run's documents are longer than the profile covers"
    )
    contexts = sum(it.num_contexts for it in plan.tasks)
    return text + (
        f"\nThe pair's profile judged this block on {contexts} other documents. There it loses "
        f"{words.bound(plan)} of the quality at most, with 95 % confidence. A server "
        f"chooses the block itself for prompts of up to {covered:,} tokens. On average these "
        "documents are a little longer, so in this run each request names the block.\n"
    )


def real_pairs() -> str:
    """Show every profile of `examples/real`, passed or not. Qualities are of held-out contexts."""
    rows = []
    for file in sorted((ROOT / "examples/real").glob("*_to_*.json")):
        profile, split = read_measured(file), read_measured(file).held_out
        plan = derived.judged(profile)
        sender, receiver = file.stem.removesuffix("_lora").split("_to_")
        judged = ["–"] * 4
        if plan is not None:
            judged = [
                words.plan(plan),
                words.quality(plan.held_out.mean),
                words.bound(plan),
                words.percent(derived.ttft_ratio(profile, plan.ttft_s)),
            ]
        rows.append(
            [
                f"`{sender}` → `{receiver}`",
                "adapters" if file.stem.endswith("_lora") else "checkpoints",
                words.quality(split.full_prefill.mean),
                words.quality(split.full_reuse.mean),
                *judged,
                "yes" if profile.passed else "no",
                f"{profile.measured_tokens:,}",
            ]
        )
    head = ["sender → receiver", "as", "full prefill", "full reuse", "plan", "with the plan"]
    head += ["loses at most", "TTFT of full prefill's, predicted", "passed", "prompts up to"]
    return table(head, rows)


def sizes() -> str:
    """Show how many tokens default memory sizes hold, for `break_even.Pair` with E at one layer."""
    pair = break_even.Pair()
    kv = pair.kv_bytes // (pair.layers - pair.block) * pair.layers
    per_gib = (1 << 30) // (kv + pair.e_bytes)
    fetched_per_gib = (1 << 30) // (pair.kv_bytes + pair.e_bytes)
    rows = []
    for memory_gb in (32, 64, 128, 256):
        keeps, fetches = HOST.of(memory_gb), STAGING.of(memory_gb)
        of_tokens = (f"{round(it, -3):,.0f}" for it in (keeps * per_gib, fetches * fetched_per_gib))
        rows.append([f"{memory_gb} GiB", f"{keeps:g} GiB", f"{fetches:g} GiB", *of_tokens])
    head = ["host memory", "`host_gb`", "`staging_gb`", "tokens it keeps", "of one fetch"]
    return (
        f"A model with the sizes of Llama-3-8B in bfloat16 takes {kv // 1024} KiB of KV and "
        f"{pair.e_bytes // 1024} KiB of E for each token: 1 GiB holds {per_gib:,} tokens. By "
        "default a server on one device has, if a quarter of the layers is recomputed,\n\n"
        f"{table(head, rows)}"
    )


def codecs() -> str:
    """Show how many bytes each codec takes, relative to bfloat16."""
    rows = ([f"`{it.value}`", f"{vector_bytes(it, 128, 2) / 256:.2f}"] for it in Codec)
    return table(["codec", "bytes, of those of bfloat16 with head_dim 128"], rows)


def refused() -> str:
    """List SGLang's arguments and environment variables that a server refuses, by reason."""
    names: dict[str, list[str]] = {}
    for field, (accepted, why) in refuse.ACCEPTED.items():
        others = [f"`{it}`" for it in accepted if it not in _NOTHING]
        flag = f"`--{field.replace('_', '-')}`" + " other than " * bool(others) + ", ".join(others)
        names.setdefault(why, []).append(flag)
    for name, why in refuse.VARIABLES.items():
        names.setdefault(why, []).append(f"`{name}` in the environment")
    return table(["what", "why"], [["; ".join(of), why] for why, of in names.items()])


def outcomes(section: str) -> str:
    sections = (
        f"### `{name}`\n\n- **Cause:** {it.cause}\n- **Remedy:** {it.remedy}\n"
        for name, it in SECTIONS[section].items()
    )
    return "\n".join(sections)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "settings": lambda: fields_of(Settings, _default),
    "controls": lambda: fields_of(Controls, _default),
    "meta_info": lambda: fields_of(RequestProvenance),
    "request_metrics": request_metrics,
    "cache_metrics": cache_metrics,
    "droidspeak": lambda: commands(droidspeak_parser()),
    "cachetree": lambda: commands(cachetree_parser()),
    **{f"outcomes_{it}": partial(outcomes, it) for it in SECTIONS},
    "break_even": break_even.markdown,
    "codecs": codecs,
    "refused": refused,
    "proof": proof,
    "real_pairs": real_pairs,
    "sizes": sizes,
    **{name: partial(tables.made, name) for name in tables.PARTS},
}


def written(page: str) -> str:
    """Make a page's parts again. Raises KeyError for an unknown part."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def llms() -> str:
    """Make `llms.txt`: the title and first paragraph of each page, in the order of the contents."""
    index = (ROOT / "docs/index.md").read_text()
    lines = ["\n\n".join(index.split("\n\n")[:2])]
    for caption, names in re.findall(
        r"```{toctree}\n:maxdepth: 1\n:caption: (.*)\n([^`]*)```", index
    ):
        lines.append(f"\n## {caption}\n")
        for name in names.split():
            title, lead = (ROOT / f"docs/{name}.md").read_text().split("\n\n")[:2]
            lines.append(f"- [{title.removeprefix('# ')}]({name}.md): {lead}")
    return "\n".join(lines) + "\n"


def pages() -> list[Path]:
    folders = ("", "benchmarks/", "examples/pairs/", "examples/real/", "platforms/torch_cpu/")
    others = [ROOT / f"{it}README.md" for it in folders]
    return [*others, *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for path in pages():
        path.write_text(written(path.read_text()))
    (ROOT / "docs/llms.txt").write_text(llms())
    pictures.write()


if __name__ == "__main__":
    main()
