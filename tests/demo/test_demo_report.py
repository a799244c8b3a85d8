"""`demo.json`, the table and the picture."""

from __future__ import annotations

import io
import json

import pytest
from msgspec.structs import replace
from rich.console import Console

from profiles.environment import read_environment
from sglang_droidspeak.demo.report import DemoReport, MeasuredPair, draw, table_of, write_json
from sglang_droidspeak.demo.results import Condition, Measured

MEANS = {
    "num_reused": 6,
    "tokens_reused": 2000.0,
    "layers_recomputed": 3.0,
    "bytes_moved": 116_736_000,
    "overlap": 0.93,
}
NOTHING = dict.fromkeys(MEANS, 0)


def part(block_ms: float = 1000.0, quality: float | None = 0.986) -> MeasuredPair:
    times = dict(zip(Condition, (4000.0, 400.0, block_ms, 410.0, 4100.0, 4050.0), strict=True))
    qualities = dict.fromkeys(Condition, quality)
    if quality is not None:
        qualities |= {Condition.FULL_PREFILL: 0.993, Condition.FULL_REUSE: 0.167}
    return MeasuredPair(
        pair="sender → receiver" if quality else "random weights",
        num_layers=12,
        block=(4, 7),
        dtype="float32",
        metric="f1" if quality else "",
        num_documents=6,
        num_questions=6,
        tokens_per_document=2000.0,
        conditions={
            it: Measured(
                **(NOTHING if it.is_full else MEANS),
                quality=qualities[it],
                ttft_p50_ms=times[it],
                ttft_p90_ms=times[it] * 1.2,
                speedup=round(4000 / times[it], 2),
                ttft_ms=(times[it],) * 6,
            )
            for it in Condition
        },
    )


@pytest.fixture
def report() -> DemoReport:
    return DemoReport(
        pair=part(),
        ceiling=part(block_ms=800.0, quality=None),
        failures=[],
        elapsed_s=123.4,
        environment=read_environment(("sglang", "torch")),
    )


def test_json_has_a_place_for_every_number(report, tmp_path):
    write_json(report, tmp_path / "demo.json")
    written = json.loads((tmp_path / "demo.json").read_text())
    conditions = written["pair"]["conditions"]
    assert {*conditions} >= {"full_prefill", "full_reuse", "block", "all_layers"}
    block = conditions["block"]
    assert block["quality"] == 0.986
    assert (block["ttft_p50_ms"], block["ttft_p90_ms"], block["speedup"]) == (1000.0, 1200.0, 4.0)
    assert block["tokens_reused"] == 2000
    assert (block["layers_recomputed"], block["bytes_moved"]) == (3, 116_736_000)
    assert block["overlap"] == 0.93
    assert written["ceiling"]["conditions"]["block"]["quality"] is None
    assert written["environment"]["num_cores"] >= 1
    assert set(written["environment"]["versions"]) >= {"sglang", "torch", "python"}


def printed(report: DemoReport) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table_of(report))
    return out.getvalue().splitlines()


def test_table_has_one_row_per_condition(report):
    lines = printed(report)
    (block,) = [line.split() for line in lines if line.strip().startswith("block ")]
    assert block == ["block", "0.986", "1,000", "1,200", "4.0", "×", "2,000", "3", "116.7", "93%"]
    (full,) = [line.split() for line in lines if line.strip().startswith("full prefill ")]
    assert full[2:] == ["0.993", "4,000", "4,800", "1.0", "×", "–", "12", "–", "–"]
    assert "layers" in lines[1] and "of 12" in lines[2]


def test_random_weights_are_a_line_of_their_own(report):
    said = " ".join(" ".join(printed(report)).split())
    assert "ceiling, time alone: 6 documents of 2,000 tokens, random weights" in said
    assert "4,000 ms by full prefill, 800 with the block, 5.0 × faster" in said


def test_an_own_pair_has_no_ceiling(report):
    assert "ceiling" not in " ".join(printed(replace(report, ceiling=None)))


def test_what_the_data_cannot_decide_is_below_the_table(report):
    assert "too few" in " ".join(printed(replace(report, notes=["2 documents are too few"])))


def test_picture_is_a_png(report, tmp_path):
    draw(report, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
