"""What `benchmarks/beside.py` found of this commit and one before, as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tools.study_tables import Table

RESULT: Final = Path(__file__).resolve().parent.parent / "benchmarks/results/beside.jsonl"
_TREE: Final = {
    "match full": "whole prompt found",
    "match partial": "part of it",
    "insert": "insert",
    "evict": "evict, a call",
}
_TRANSPORT: Final = {"transport": "raw TCP, the better of two each turn", "in place": "memcpy"}

Found = Mapping[str, Any]


def cache() -> Table:
    """The tree, the transport and the disk: medians before and now, of the latest run of each."""
    runs = [json.loads(line) for line in RESULT.read_text().splitlines()]
    latest = {it["script"][0]: it["before_and_now"] for it in runs}
    rows = [
        [name, *(both[side] for side in (0, 1))]
        for name, both in (
            *_tree(latest["tree.py"]),
            *_transport(latest["transport.py"]),
            *_disk(latest["disk.py"]),
        )
    ]
    return ["", runs[-1]["before"][:7], "now"], rows


def _tree(found: Found) -> Iterator[tuple[str, list[str]]]:
    start = "tree / runs 0"
    for policy in ("lru", "value"):
        for key, said in _TREE.items():
            times = f"{start} / times / {key} / cachetree, {policy}"
            p50, p99 = found[f"{times} / p50_us"], found[f"{times} / p99_us"]
            both = [f"{a:.0f} / {b:.0f}" for a, b in zip(p50, p99, strict=True)]
            yield f"tree, {policy}: {said}, CPU µs, p50 / p99", both
    sizes = found[f"{start} / bytes_per_page_and_model / cachetree, lru"]
    yield "tree: bytes a page", [f"{it:.0f}" for it in sizes]


def _transport(found: Found) -> Iterator[tuple[str, list[str]]]:
    speeds = "how much of raw TCP's speed does the transport keep"
    copies = "how much of memcpy's speed does a fetch in place keep"
    for kib in (1024, 4096):
        for (way, beside), question in zip(_TRANSPORT.items(), (speeds, copies), strict=True):
            yield (
                f"{way}, frames of {kib // 1024} MiB, GB/s",
                _two(found[f"{question} / gb_per_s / {kib} / {way}"]),
            )
            yield f"of {beside}", _two(found[f"{question} / ratio_by_frame_kib / {kib}"])
            yield "CPU s/GB", _two(found[f"{question} / cpu_s_per_gb / {kib} / {way}"])


def _disk(found: Found) -> Iterator[tuple[str, list[str]]]:
    for what in ("write", "write, synced", "read, warm", "read, cold"):
        yield f"disk: {what}, GB/s", _two(found[f"disk / {what} / gb_per_s / store"])
        yield "of a plain file", _two(found[f"disk / {what} / of_plain"])
        yield "CPU s/GB", _two(found[f"disk / {what} / cpu_s_per_gb / store"])


def _two(both: list[float]) -> list[str]:
    return [f"{it:.2f}" for it in both]
