"""`demo.json`, the table and the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from profiles.environment import read_environment
from sglang_droidspeak.demo.conditions import Condition
from sglang_droidspeak.demo.picture import draw
from sglang_droidspeak.demo.report import DemoReport, Part, table_of, write_json
from sglang_droidspeak.demo.results import Quality, Speed

MEANS = {
    "num_requests": 6,
    "num_reused": 6,
    "tokens_reused": 2000.0,
    "layers_recomputed": 3.0,
    "layers_loaded": 9.0,
    "bytes_moved": 116_736_000,
    "fetch_ms": 150.0,
    "recompute_ms": 900.0,
    "overlap": 0.93,
}
NOTHING = dict.fromkeys(MEANS, 0) | {"num_requests": 6}


@pytest.fixture
def report() -> DemoReport:
    part = Part(
        pair="sender → receiver",
        num_layers=12,
        block=(4, 7),
        dtype="float32",
        num_documents=6,
        num_requests=6,
        tokens_per_document=2000.0,
    )
    times = dict(zip(Condition, (4000.0, 400.0, 1000.0, 4100.0), strict=True))
    f1 = dict(zip(Condition, (0.993, 0.167, 0.986, 0.993), strict=True))
    means = {it: NOTHING if it is Condition.FULL_PREFILL else MEANS for it in Condition}
    return DemoReport(
        quality={it: Quality(**means[it], f1=f1[it]) for it in Condition},
        speed={
            it: Speed(
                **means[it],
                ttft_p50_ms=times[it],
                ttft_p90_ms=times[it] * 1.2,
                speedup=round(4000 / times[it], 2),
                ttft_ms=(times[it],) * 6,
            )
            for it in Condition
        },
        quality_on=part,
        speed_on=part,
        failures=[],
        elapsed_s=123.4,
        environment=read_environment(("sglang", "torch")),
    )


def test_json_has_a_place_for_every_number(report: DemoReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "demo.json")
    found = json.loads((tmp_path / "demo.json").read_text())
    names = {"full_prefill", "full_reuse", "block", "all_layers"}
    assert set(found["quality"]) == set(found["speed"]) == names
    assert found["quality"]["block"]["f1"] == 0.986
    speed = found["speed"]["block"]
    assert (speed["ttft_p50_ms"], speed["ttft_p90_ms"], speed["speedup"]) == (1000.0, 1200.0, 4.0)
    assert speed["tokens_reused"] == 2000
    assert (speed["layers_recomputed"], speed["bytes_moved"]) == (3, 116_736_000)
    assert speed["overlap"] == 0.93
    assert found["environment"]["num_cores"] >= 1
    assert set(found["environment"]["versions"]) >= {"sglang", "torch", "python"}


def test_table_has_one_row_per_condition(report: DemoReport) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table_of(report))
    lines = out.getvalue().splitlines()
    (block,) = [line.split() for line in lines if line.strip().startswith("block ")]
    assert block == ["block", "0.986", "1,000", "1,200", "4.0", "×", "2,000", "3", "116.7", "93%"]
    (full,) = [line.split() for line in lines if line.strip().startswith("full prefill ")]
    assert full[2:] == ["0.993", "4,000", "4,800", "1.0", "×", "–", "12", "–", "–"]
    assert "layers" in lines[1] and "of 12" in lines[2]


def test_picture_is_a_png(report: DemoReport, tmp_path: Path) -> None:
    draw(report, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
