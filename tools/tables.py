"""Fill the tables and sentences of pages with results, by templates; `tables.md` explains the
templates."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

RESULTS: Final = Path(__file__).resolve().parents[1] / "benchmarks/results"

Row = Mapping[str, Any]


class Template(NamedTuple):
    """A heading of `tables.md` and the text below it."""

    result: str
    rows: str
    """Source of the rows: keys of lists in the result, or the name of a function in ROWS."""
    by: Sequence[str]
    head: str
    """Head of the table. Empty for a sentence without a table."""
    lines: Sequence[str]
    """Lines of the table. Each row of the result fills all lines once."""
    after: str


def _templates() -> Iterator[tuple[str, Template]]:
    pages = Path(__file__).with_suffix(".md").read_text()
    pattern = r"\n### (\w+): (.+?)(?: by (.+))? of (\S+)\n((?:.*\n)+?)(?=\n#|\Z)"
    for name, rows, by, result, text in re.findall(pattern, pages):
        head, *lines = [it[2:-2] for it in text.split("\n") if it.startswith("|")] or [""]
        (after,) = [it for it in text.split("\n") if it and not it.startswith("|")] or [""]
        yield name, Template(result, rows, by.split(), head, lines, after)


PARTS: Final = dict(_templates())


def made(name: str) -> str:
    """Fill a part of a page with its stored result, and name the machine that measured it."""
    result = PARTS[name].result
    try:
        results = read(result)
    except FileNotFoundError:
        return f"There is no result yet: `make bench` writes `results/{result}.json`.\n"
    on = where(results) if isinstance(results, dict) else ""
    return _filled(PARTS[name], results) + (f"\n{on}.\n" if on else "")


def shown(result: str, results: Any) -> Iterator[str]:
    """Fill every table of a result that was just measured."""
    return (_filled(it, results) for it in PARTS.values() if it.result == result)


def read(name: str) -> Any:
    """Read `results/NAME.json`, or the lines of the log `results/NAME.jsonl`."""
    log = RESULTS / f"{name}.jsonl"
    if log.exists():
        return [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_bytes())


def where(results: Row) -> str:
    """Describe the machine of a result, or of each part of it, with its load before the run."""
    parts = [it for value in results.values() if isinstance(value, list) for it in value]
    runs = [results] if "environment" in results else parts
    runs = [it for it in runs if isinstance(it, Mapping) and "environment" in it]
    text = (
        "{processor}, {num_cores} cores, load before the run {load_before:.1f}, commit {commit!c}"
    )
    return "; ".join(dict.fromkeys(fill(text, it["environment"]) for it in runs))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(row) for row in (head, ["---"] * len(head), *rows))
    return "".join(f"| {line} |\n" for line in lines)


def fill(text: str, row: Row, default: str = "") -> str:
    """Put the row's numbers into the text, or return a stated `default` if the row has none."""
    cells = _Cells()
    filled = cells.vformat(text, (), row)
    return default if default and cells.are_missing == {True} else filled


class _Cells(string.Formatter):
    def __init__(self) -> None:
        self.are_missing: set[bool] = set()

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            one, *of = [
                super(_Cells, self).get_field(it, args, kwargs)[0] for it in field_name.split("/")
            ]
            value = one / of[0] if of else one
        except (KeyError, TypeError):
            value = None
        self.are_missing.add(value is None)
        return value, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value if conversion is None or value is None else _CONVERSIONS[conversion](value)

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else str(super().format_field(value, format_spec))


_CONVERSIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "k": lambda it: it / 1e3,
    "M": lambda it: it / 1e6,
    "n": len,
    "c": lambda it: it[:7] + "+" * it.endswith("+") or "unknown",
    "w": lambda it: it.replace("_", " "),
    "s": lambda it: sum(it.values()),
    "o": lambda it: ", ".join(f"{num} `{outcome}`" for outcome, num in it.items()),
}


def _filled(template: Template, results: Any) -> str:
    rows = ROWS[template.rows](results) if template.rows in ROWS else _listed(results, template)
    if not template.head:
        return fill(template.after, next(iter(rows))) + "\n"
    cells = [[text.partition("??") for text in line.split(" | ")] for line in template.lines]
    lines = (
        [fill(text, row, default or "–") for text, _, default in line]
        for row in rows
        for line in cells
    )
    after = f"\n{fill(template.after, results)}\n" if template.after else ""
    return table(template.head.split(" | "), lines) + after


def _listed(results: Any, template: Template) -> Iterator[Row]:
    for key in template.rows.split():
        yield from _below(results[key], template.by)


def _below(data: Any, by: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows below nested keys. Each row also has these keys, under the names in `by`."""
    if by:
        for key, value in data.items():
            yield from ({by[0]: key, **row} for row in _below(value, by[1:]))
    else:
        yield from data if isinstance(data, list) else [data]


def devices(results: Any) -> Iterator[Row]:
    for name, figures in results.items():
        if isinstance(figures, dict) and "num_cells" in figures:
            yield {"device": name, **figures}


def codecs(results: Any) -> Iterable[Row]:
    """Yield a row for each codec: the quality of a block for each pair, and the codec's speeds."""
    blocks = [it for it in results["quality"] if it["what"] == "block"]
    rows = {it["codec"]: dict(it) for it in blocks}
    for row in blocks:
        rows[row["codec"]][row["pair"]] = row
    for row in results["speed"]:
        rows.get(row["codec"], {})[row["what"]] = row["gb_per_s"]
    return rows.values()


def parts_on_a_gpu(results: Any) -> Iterator[Row]:
    for row in results["rows"]:
        for what, value in row.items():
            if what not in ("part", "environment"):
                shown = round(value, 3) if isinstance(value, float) else value
                yield {**row, "what": what, "found": shown}


def sizes_of_frames(results: Any) -> Iterator[Row]:
    """Yield one row, which has the result for each size of a frame."""
    yield {f"{it['frame_mib']} MiB": it for it in results["rows"]}


def latest_soaks(log: Any) -> Iterator[Row]:
    """Yield one row that holds the latest line of the log for each kind of soak. The first word of
    a line's question names its kind."""
    yield {it["question"].split()[0]: {"harms": {}, "broken": (), **it} for it in log}


def sets_of_contexts(results: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict for each pair and each set of contexts on which the pair was measured. It has
    the title of its rows (`of`), and the results of each plan under the plan's name."""
    sets = {"long": " long", "texts": " pages and code"}
    for row in results["measured"]:
        of = f"{row['pair'].replace('_', ' ')}, {row['contexts']}{sets.get(row['on'], '')}"
        yield {**row, **{plan["plan"]: plan for plan in row["plans"]}, "of": of}


def corrected_blocks(results: Any) -> Iterator[Row]:
    """Yield each block with plain and with corrected E. `longest` is the longest block that is no
    closer to full prefill with plain E."""
    for of in sets_of_contexts(results):
        plain = [name for name in of if f"{name} corrected" in of]
        for name in plain:
            corrected = of[f"{name} corrected"]
            as_far = [it for it in plain if of[it]["kl"] >= corrected["kl"]]
            longest = max(as_far, key=_num_layers, default="–")
            both = {"plain": of[name], "corrected": corrected}
            yield {"of": of["of"], "block": name, **both, "longest": longest}


def some_corrected_blocks(results: Any) -> Iterator[Row]:
    """Yield the blocks of `corrected_blocks` that the page of corrected E talks about."""
    for row in corrected_blocks(results):
        pair, _, contexts = row["of"].partition(", ")
        if contexts.isdecimal() and (pair, row["block"]) in SOME_BLOCKS:
            yield {**row, "pair": pair}


SOME_BLOCKS: Final = {
    ("base to json", "[18, 24)"),
    ("base to questions", "[6, 24)"),
    ("base to questions", "[16, 24)"),
    ("questions to json", "[22, 24)"),
}


def _num_layers(block: str) -> int:
    start, stop = map(int, block[1:-1].split(", "))
    return stop - start


def kinds_of_maps(results: Any) -> Iterator[Row]:
    kinds = ("bias", "rank 8", "rank 16", "rank 64", "full")
    for of in sets_of_contexts(results):
        for name in of:
            if f"{name} bias" in of:
                corrected = {kind: of[f"{name} {kind}"] for kind in kinds}
                yield {"of": of["of"], "block": name, "plain": of[name], **corrected}


def layers_of_maps(results: Any) -> Iterator[Row]:
    for pair in results["fitted"]:
        yield from ({"pair": pair["pair"], **row} for row in _below(pair["layers"], ["layer"]))


def in_time(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Return the rows of the highest rate in time, and of the next rate. A rate is in time if 90 %
    of requests were in time, at this rate and at all lower ones. A missing row is empty."""
    best: Row = {}
    for row in sorted(rows, key=lambda row: row["request_rate"]):
        if row["attainment"] < 0.9:
            return best, row
        best = row
    return best, {}


def rates_in_time(results: Any) -> Iterator[Row]:
    """Yield the two rates between which each contender starts to miss the target, and its times on
    an idle server."""
    for name, of in results["rows"].items():
        best, lost = in_time(of)
        idle = {key: results[key][name] for key in ("idle_ttft_ms", "idle_latency_ms", "bound")}
        yield {"contender": name, "kept": best, "lost": lost, **idle}


def the_gain(results: Any) -> Iterator[Row]:
    """Yield one row, with the highest rate in time of the block, and of SGLang alone. If no rate
    was in time, it has the lowest rate that ran."""
    for_sentence = {"block": "block", "alone": "SGLang alone"}
    ends = {key: in_time(results["rows"][name]) for key, name in for_sentence.items()}
    yield {**results, **{key: kept or lost for key, (kept, lost) in ends.items()}}


def beside_theory(results: Any) -> Iterator[Row]:
    for row in _below(results["rows"], ["contender"]):
        wait_ms, idle_ms = row["mean_wait_ms_in_theory"], results["idle_ttft_ms"][row["contender"]]
        yield {**row, "in_theory_ms": None if wait_ms is None else wait_ms + idle_ms}


def uneven_streams(results: Any) -> Iterator[Row]:
    kinds = {"step": "the rate doubles", "gamma": "bursts"}
    for row in _below(results["rows"], ["kind", "contender"]):
        yield {"stream": kinds[row["kind"]], "beyond": 1 - row["attainment"], **row}


def strategies(results: Any) -> Iterator[Row]:
    """Yield each strategy's gain over the first strategy, as measured and as predicted."""
    first = results["rows"][0]
    for row in results["rows"]:
        measured, expected = (
            first[key] / row[key] for key in ("median_total_ttft_ms", "predicted_ms")
        )
        yield {**row, "measured": measured, "expected": expected, "off": measured / expected - 1}


ROWS: Final[dict[str, Callable[[Any], Iterable[Row]]]] = {
    it.__name__: it
    for it in (
        *(devices, codecs, sizes_of_frames, parts_on_a_gpu, latest_soaks, strategies),
        *(sets_of_contexts, corrected_blocks, some_corrected_blocks, kinds_of_maps, layers_of_maps),
        *(rates_in_time, the_gain, beside_theory, uneven_streams),
    )
}
