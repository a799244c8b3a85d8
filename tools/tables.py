"""Tables and sentences of results, by the templates of `tables.md`, which says how to read them."""

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
    """A heading of `tables.md` with what stands below it."""

    result: str
    rows: str
    """Keys of lists in the result, or the name of a function in ROWS."""
    by: Sequence[str]
    head: str
    """Empty for a sentence without a table."""
    lines: Sequence[str]
    """Each is filled with every row."""
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
    """A part of a page: of the result that is kept, and what that was measured on."""
    result = PARTS[name].result
    try:
        found = read(result)
    except FileNotFoundError:
        return f"There is no result yet: `make bench` writes `results/{result}.json`.\n"
    on = where(found) if isinstance(found, dict) else ""
    return _filled(PARTS[name], found) + (f"\n{on}.\n" if on else "")


def shown(result: str, found: Any) -> Iterator[str]:
    """Every table of a result that was just found."""
    return (_filled(it, found) for it in PARTS.values() if it.result == result)


def read(name: str) -> Any:
    """`results/NAME.json`, or the lines of a log, `results/NAME.jsonl`."""
    log = RESULTS / f"{name}.jsonl"
    if log.exists():
        return [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_bytes())


def where(found: Row) -> str:
    """What a result, or each part of it, was measured on, and whether anything else ran there."""
    parts = [it for value in found.values() if isinstance(value, list) for it in value]
    runs = [found] if "environment" in found else parts
    runs = [it for it in runs if isinstance(it, Mapping) and "environment" in it]
    text = (
        "{processor}, {num_cores} cores, load before the run {load_before:.1f}, commit {commit!c}"
    )
    return "; ".join(dict.fromkeys(told(text, it["environment"]) for it in runs))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(row) for row in (head, ["---"] * len(head), *rows))
    return "".join(f"| {line} |\n" for line in lines)


def told(text: str, row: Row, default: str = "") -> str:
    """The text with the row's numbers in it; the default if there is one and all are missing."""
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


def _filled(it: Template, found: Any) -> str:
    rows = ROWS[it.rows](found) if it.rows in ROWS else _listed(found, it)
    if not it.head:
        return told(it.after, next(iter(rows))) + "\n"
    cells = [[text.partition("??") for text in line.split(" | ")] for line in it.lines]
    lines = (
        [told(text, row, default or "–") for text, _, default in line]
        for row in rows
        for line in cells
    )
    after = f"\n{told(it.after, found)}\n" if it.after else ""
    return table(it.head.split(" | "), lines) + after


def _listed(found: Any, it: Template) -> Iterator[Row]:
    for key in it.rows.split():
        yield from _below(found[key], it.by)


def _below(found: Any, by: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows that lie under keys: each with its keys, by name."""
    if by:
        for key, value in found.items():
            yield from ({by[0]: key, **row} for row in _below(value, by[1:]))
    else:
        yield from found if isinstance(found, list) else [found]


def devices(found: Any) -> Iterator[Row]:
    for name, it in found.items():
        if isinstance(it, dict) and "num_cells" in it:
            yield {"device": name, **it}


def codecs(found: Any) -> Iterable[Row]:
    """Each codec: a block's quality by pair, and its speeds."""
    blocks = [it for it in found["quality"] if it["what"] == "block"]
    rows = {it["codec"]: dict(it) for it in blocks}
    for it in blocks:
        rows[it["codec"]][it["pair"]] = it
    for it in found["speed"]:
        rows.get(it["codec"], {})[it["what"]] = it["gb_per_s"]
    return rows.values()


def parts_on_a_gpu(found: Any) -> Iterator[Row]:
    for row in found["rows"]:
        for what, value in row.items():
            if what not in ("part", "environment"):
                shown = round(value, 3) if isinstance(value, float) else value
                yield {**row, "what": what, "found": shown}


def sizes_of_frames(found: Any) -> Iterator[Row]:
    """One row: the results by the size of a frame."""
    yield {f"{it['frame_mib']} MiB": it for it in found["rows"]}


def latest_soaks(found: Any) -> Iterator[Row]:
    """One row: the latest line of the log of each kind, by the first word of its question."""
    yield {it["question"].split()[0]: {"harms": {}, "broken": (), **it} for it in found}


def sets_of_contexts(found: Any) -> Iterator[dict[str, Any]]:
    """Each pair and set of contexts, with its plans by name."""
    sets = {"long": " long", "texts": " pages and code"}
    for it in found["measured"]:
        of = f"{it['pair'].replace('_', ' ')}, {it['contexts']}{sets.get(it['on'], '')}"
        yield {**it, **{plan["plan"]: plan for plan in it["plans"]}, "of": of}


def corrected_blocks(found: Any) -> Iterator[Row]:
    """Each block from the sender's E as it is, and from corrected E."""
    for of in sets_of_contexts(found):
        plain = [name for name in of if f"{name} corrected" in of]
        for name in plain:
            corrected = of[f"{name} corrected"]
            as_far = [it for it in plain if of[it]["kl"] >= corrected["kl"]]
            longest = max(as_far, key=_num_layers, default="–")
            both = {"plain": of[name], "corrected": corrected}
            yield {"of": of["of"], "block": name, **both, "longest": longest}


def _num_layers(block: str) -> int:
    start, stop = map(int, block[1:-1].split(", "))
    return stop - start


def kinds_of_maps(found: Any) -> Iterator[Row]:
    kinds = ("bias", "rank 8", "rank 16", "rank 64", "full")
    for of in sets_of_contexts(found):
        for name in of:
            if f"{name} bias" in of:
                corrected = {kind: of[f"{name} {kind}"] for kind in kinds}
                yield {"of": of["of"], "block": name, "plain": of[name], **corrected}


def layers_of_maps(found: Any) -> Iterator[Row]:
    for it in found["fitted"]:
        yield from ({"pair": it["pair"], **row} for row in _below(it["layers"], ["layer"]))


def in_time(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Of a contender: what the highest rate gave up to which nine of ten requests kept the target
    at each rate that was run, and what the next one did. Empty where there is none."""
    kept: Row = {}
    for row in sorted(rows, key=lambda row: row["request_rate"]):
        if row["attainment"] < 0.9:
            return kept, row
        kept = row
    return kept, {}


def rates_in_time(found: Any) -> Iterator[Row]:
    """The rates that were run between which the target is lost, beside what theory allows."""
    for name, of in found["rows"].items():
        kept, lost = in_time(of)
        idle = {key: found[key][name] for key in ("idle_ttft_ms", "idle_latency_ms", "bound")}
        yield {"contender": name, "kept": kept, "lost": lost, **idle}


def the_gain(found: Any) -> Iterator[Row]:
    """Of each the highest rate in time, or the lowest that was run."""
    for_sentence = {"block": "block", "alone": "SGLang alone"}
    ends = {key: in_time(found["rows"][name]) for key, name in for_sentence.items()}
    yield {**found, **{key: kept or lost for key, (kept, lost) in ends.items()}}


def beside_theory(found: Any) -> Iterator[Row]:
    for row in _below(found["rows"], ["contender"]):
        wait_ms, idle_ms = row["mean_wait_ms_in_theory"], found["idle_ttft_ms"][row["contender"]]
        yield {**row, "in_theory_ms": None if wait_ms is None else wait_ms + idle_ms}


def uneven_streams(found: Any) -> Iterator[Row]:
    kinds = {"step": "the rate doubles", "gamma": "bursts"}
    for row in _below(found["rows"], ["kind", "contender"]):
        yield {"stream": kinds[row["kind"]], "beyond": 1 - row["attainment"], **row}


def strategies(found: Any) -> Iterator[Row]:
    """Each strategy beside the first one, as measured and as predicted."""
    first = found["rows"][0]
    for row in found["rows"]:
        measured, expected = (
            first[key] / row[key] for key in ("median_total_ttft_ms", "predicted_ms")
        )
        yield {**row, "measured": measured, "expected": expected, "off": measured / expected - 1}


ROWS: Final[dict[str, Callable[[Any], Iterable[Row]]]] = {
    it.__name__: it
    for it in (
        *(devices, codecs, sizes_of_frames, parts_on_a_gpu, latest_soaks, strategies),
        *(sets_of_contexts, corrected_blocks, kinds_of_maps, layers_of_maps),
        *(rates_in_time, the_gain, beside_theory, uneven_streams),
    )
}
