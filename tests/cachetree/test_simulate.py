"""Traces are read strictly, made alike every time, and replayed into numbers that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.simulate import (
    GENERATORS,
    Header,
    Outcome,
    PageNames,
    Request,
    Trace,
    generate,
    read_trace,
    replay,
    write_trace,
)
from benchmarks.simulate.__main__ import main, row
from cachetree.errors import ConfigError
from cachetree.planning import PrefillCost
from cachetree.tree.eviction import POLICIES, Retention

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "benchmarks/traces"
FAMILY = msgspec.structs.replace(
    generate("multi_agent", 0).header.family,
    num_layers=1,
    hidden_size=4,
    num_kv_heads=1,
    head_dim=1024,
    page_size=10,
)
PAGE_BYTES = FAMILY.kv_page_bytes
HEADER = msgspec.json.encode(Header(family=FAMILY)).decode()
COST = PrefillCost(token_s=1.0, context_s=0.01)
LINE = '{"at_s": 1, "model": "m", "prompt": [["a", 10]]}'


def a_replay(prompts: list[tuple[str, tuple[tuple[str, int], ...]]], num_pages: int) -> Outcome:
    requests = [Request(at_s=float(i), model=m, prompt=it) for i, (m, it) in enumerate(prompts)]
    trace = Trace(header=Header(family=FAMILY), requests=requests)
    return replay(trace, PageNames(10), Retention(), num_pages * PAGE_BYTES, COST)


def test_a_hit_is_the_models_own_prefix_in_whole_pages() -> None:
    outcome = a_replay(
        [
            ("m", (("a", 25), ("b", 20))),  # 4 pages
            ("m", (("a", 25), ("b", 10), ("c", 10))),  # 3 of them, though a page has a and b
            ("n", (("a", 25), ("b", 20))),  # another model's are no hit
            ("m", (("b", 20),)),  # nor is a segment at another place
        ],
        100,
    )
    assert (outcome.num_requests, outcome.num_hits) == (4, 1)
    assert (outcome.num_tokens, outcome.num_hit_tokens) == (45 * 3 + 20, 30)
    assert outcome.num_evictions == outcome.num_refused == 0
    # Token t costs 1 + t / 100.
    assert outcome.saved_s == pytest.approx(30 + 30 * 30 / 200)
    assert outcome.prefill_s == pytest.approx(3 * (45 + 45 * 45 / 200) + 20 + 20 * 20 / 200)


def test_evictions_and_refusals_are_counted() -> None:
    outcome = a_replay(
        [("m", ((name, 20),)) for name in "abca"] + [("m", (("long", 50),))], num_pages=4
    )
    assert (outcome.num_evictions, outcome.num_evicted_bytes) == (2, 4 * PAGE_BYTES)
    assert (outcome.num_hits, outcome.num_refused) == (0, 1)


def test_segments_of_one_name_begin_alike() -> None:
    names = PageNames(10)
    short, long = names.of((("a", 20),)), names.of((("a", 30), ("b", 5)))
    assert (len(short), len(long)) == (2, 3)
    assert long[:2] == short
    assert names.of((("a", 25), ("b", 5)))[2] != long[2]
    assert names.of((("a1", 10),)) != names.of((("a", 10),))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_shipped_traces_are_what_the_generator_makes(name: str, tmp_path: Path) -> None:
    shipped = TRACES / f"{name}.jsonl"
    made = tmp_path / "made.jsonl"
    assert main(["--generate", name, "--seed", "0", "--out", str(made)]) == 0
    assert made.read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size < 300_000
    assert read_trace(shipped) == Trace(
        header=read_trace(shipped).header, requests=generate(name, 0).requests
    )
    assert generate(name, 1).requests != generate(name, 0).requests


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no requests"),
        ([HEADER], "has no requests"),
        ([LINE], "line 1: .*unknown field `at_s`"),
        ([HEADER.replace('"version":1', '"version":2'), LINE], r"line 1: .*\$.version"),
        ([HEADER, LINE, "{"], "line 3: "),
        ([HEADER, LINE.replace("model", "modell")], "line 2: .*modell"),
        ([HEADER, LINE.replace("10", "0")], "line 2: .*>= 1"),
        ([HEADER, LINE.replace("10", "1e99")], "line 2: .*int"),
        ([HEADER, LINE.replace("10", "9999999")], "line 2: .*<= 2097152"),
        ([HEADER, LINE.replace('["a", 10]', ", ".join(['["a", 2097152]'] * 2))], "line 2: .*more"),
        ([HEADER, LINE.replace('["a", 10]', "")], "line 2: .*length >= 1"),
        ([HEADER, LINE.replace('["a", 10]', ", ".join(['["a", 1]'] * 1025))], "length <= 1024"),
        ([HEADER, LINE.replace('"m"', f'"{"m" * (1 << 20)}"')], "line 2 is longer than"),
        ([HEADER, LINE, LINE.replace("1,", "0.5,", 1)], "line 3: at_s is 0.5, before the 1.0"),
        ([HEADER, LINE.replace("1,", "NaN,", 1)], "line 2: "),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(lines: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError, match=words) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    trace = generate("multi_lora", 7)
    write_trace(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == Trace(
        header=trace.header, requests=list(trace.requests)
    )
    with pytest.raises(ConfigError, match="missing"):
        read_trace(tmp_path / "missing")


def test_the_command_prints_a_table_and_a_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "t.jsonl", tmp_path / "kept.json"
    path.write_text(f"{HEADER}\n{LINE}\n{LINE}\n")
    assert main([str(path), "--policy", "lru,value", "--json", str(kept)]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert "| `t`, 32 GiB | 50.0%, 0 s | 50.0%, 0 s |" in table
    found = json.loads(line)
    assert found == json.loads(kept.read_text())
    assert found["policies"] == ["lru", "value"]
    assert {found["rows"][0][it]["token_hit_rate"] for it in found["policies"]} == {0.5}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "either a TRACE"),
        (["t.jsonl", "--out", "x"], "either a TRACE"),
        (["t.jsonl", "--generate", "multi_lora", "--out", "x"], "either a TRACE"),
        (["t.jsonl", "--policy", "lru,mru"], "eviction is 'mru'"),
        (["t.jsonl", "--host-gb", "0"], "--host-gb is 0.0"),
        (["t.jsonl"], "t.jsonl cannot be read"),
        (["--generate", "multi_lora", "--out", "/no/such/folder/t"], "cannot be written"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


ROWS = json.loads((ROOT / "benchmarks/results/simulate.json").read_bytes())["rows"]


def test_the_result_has_rows_of_each_trace() -> None:
    assert {row["trace"] for row in ROWS} == set(GENERATORS)


@pytest.mark.parametrize(
    "rows", [ROWS[:1], pytest.param(ROWS[1:], marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_the_result_is_what_the_replay_gives(rows: list[dict[str, Any]]) -> None:
    for kept in rows:
        found = row(TRACES / f"{kept['trace']}.jsonl", kept["host_gb"], list(POLICIES))
        for policy in POLICIES:
            del kept[policy]["wall_s"], found[policy]["wall_s"]
        assert found == kept
