"""How much sooner does the first token come when the prefix is another model's, and what limits it?

    python benchmarks/partial_prefill.py [--documents 7] [--dtype float32] [--codec none]

Two real servers with randomly initialised models of 12 layers × 768 and a 2,000-token document;
the receiver loads nine layers from the sender over loopback and recomputes three, [4, 7).

Physics: a full prefill computes 12 layers for every token. The recompute computes two of them and
the K and V projections of the third, about 2.1/12 of the work, so the ideal is that share of the
full prefill plus the forward over the new tokens, which attends over the prefix in every layer. On
top of that comes overhead: matching, fetching, copying into slots, scheduling. Each server computes
with one thread, so that on two cores the other one moves the bytes. The contenders are interleaved
on the same documents, and their answers are compared before their times: the block of all layers
must give the tokens of the full prefill.

The second part puts a paced link (the transport's own bandwidth cap) between the two and compares
what the paper compares: everything loaded first, only the reused layers loaded first, and loads
and recompute pipelined; with what `schedule.py` predicts from the measured parts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import result
from relay import (
    HIDDEN,
    NUM_LAYERS,
    NUM_NEW,
    Bench,
    Sample,
    Setup,
    bench,
    console,
    median,
    mirror,
    paced,
    publish,
    ttft,
)
from rich.table import Table
from schedule import Request, schedule

from cachetree import Span
from cachetree.planning import Strategy

BLOCK = Span(4, 7)
NUM_SHARED = 2000
CONDITIONS: Mapping[str, Mapping[str, str]] = {
    "full_prefill": {"mode": "off"},
    "full_reuse": {"block": "none"},
    "block": {"block": f"{BLOCK.start}:{BLOCK.stop}"},
    "all_layers": {"block": "all"},
}
STRATEGIES = (Strategy.EVERYTHING_FIRST, Strategy.REUSED_FIRST, Strategy.PIPELINED)


def speed(it: Bench) -> dict[str, list[Sample]]:
    """Every condition on every document, interleaved; the first document warms up."""
    samples: dict[str, list[Sample]] = {name: [] for name in CONDITIONS}
    for document in range(len(it.documents)):
        for name, controls in CONDITIONS.items():
            sample = it.ask(document, controls)
            wanted = "off" if name == "full_prefill" else "reused"
            assert sample.provenance["outcome"] == wanted, (name, sample.provenance)
            if document:
                samples[name].append(sample)
    for full, again in zip(samples["full_prefill"], samples["all_layers"], strict=True):
        assert full.token == again.token, "all layers recomputed must answer as a full prefill"
    return samples


def throttled(it: Bench, bytes_per_s: float) -> dict[Strategy, list[Sample]]:
    samples: dict[Strategy, list[Sample]] = {strategy: [] for strategy in STRATEGIES}
    with paced(it, bytes_per_s, CONDITIONS["full_reuse"]):
        for document in range(min(4, len(it.documents))):
            for strategy in STRATEGIES:
                controls = {**CONDITIONS["block"], "strategy": strategy.value}
                sample = it.ask(document, controls)
                assert sample.provenance["outcome"] == "reused", sample.provenance
                samples[strategy].append(sample)
    for triple in zip(*samples.values(), strict=True):
        assert len({sample.token for sample in triple}) == 1, "strategies must agree"
    return samples


def field(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.provenance[name]


def report_speed(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    parts = ("match_ms", "queued_ms", "fetch_ms", "load_ms", "recompute_ms", "forward_ms")
    table = Table(title=f"TTFT, {NUM_SHARED} shared + {NUM_NEW} new tokens, medians in ms")
    for column in ("condition", "TTFT", "× faster", *(part[:-3] for part in parts)):
        table.add_column(column, justify="left" if column == "condition" else "right")
    full_ms = median(samples["full_prefill"], ttft)
    summary: dict[str, Any] = {}
    for name, of in samples.items():
        ms = median(of, ttft)
        values = {part: median(of, field(part)) for part in parts}
        summary[name] = {"ttft_p50_ms": ms, "speedup": full_ms / ms, **values}
        cells = [f"{values[part]:.1f}" for part in parts]
        table.add_row(name, f"{ms:.0f}", f"{full_ms / ms:.2f}", *cells)
    console.print(table)
    forward_ms = summary["block"]["forward_ms"]
    share = share_computed()
    ideal_ms = full_ms * share + forward_ms
    summary["ideal_ms"] = ideal_ms
    summary["over_ideal"] = summary["block"]["ttft_p50_ms"] / ideal_ms
    console.print(
        f"ideal {ideal_ms:.0f} ms = full prefill × {NUM_LAYERS * share:.2f}/{NUM_LAYERS} + forward "
        f"{forward_ms:.0f} ms; the block takes {summary['over_ideal']:.2f} of it"
    )
    return summary


def share_computed() -> float:
    """Multiplications of the block's full layers and its last K and V, of those of all layers."""
    mlp = HIDDEN * 8 // 3 // 64 * 64
    kv = 2 * HIDDEN * HIDDEN
    layer = kv + 2 * HIDDEN * HIDDEN + 3 * HIDDEN * mlp + HIDDEN * NUM_SHARED
    return (len(BLOCK) - 1 + kv / layer) / NUM_LAYERS


def report_throttled(rate: float, samples: Mapping[Strategy, Sequence[Sample]]) -> dict[str, Any]:
    first = samples[Strategy.REUSED_FIRST]
    fetch_ms = median(first, field("fetch_ms"))
    recompute_ms = median(first, field("recompute_ms"))
    base_ms = median(first, ttft) - fetch_ms - recompute_ms
    table = Table(title=f"link paced to {rate / 1e6:.0f} MB/s, medians in ms")
    for column in ("strategy", "TTFT", "predicted", "fetch", "recompute"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    summary: dict[str, Any] = {"mb_per_s": rate / 1e6}
    for strategy, of in samples.items():
        ms = median(of, ttft)
        predicted_ms = base_ms + predict(strategy, fetch_ms, recompute_ms)
        summary[strategy.value] = {"ttft_p50_ms": ms, "predicted_ms": predicted_ms}
        fetched, recomputed = (median(of, field(f"{part}_ms")) for part in ("fetch", "recompute"))
        table.add_row(
            strategy.value,
            f"{ms:.0f}",
            f"{predicted_ms:.0f}",
            f"{fetched:.0f}",
            f"{recomputed:.0f}",
        )
    console.print(table)
    pipelined_ms = summary["pipelined"]["ttft_p50_ms"]
    hidden_ms = fetch_ms + recompute_ms + base_ms - pipelined_ms
    summary["speedup"] = summary["everything_first"]["ttft_p50_ms"] / pipelined_ms
    summary["hidden"] = hidden_ms / min(fetch_ms, recompute_ms)
    console.print(
        f"pipelined is {summary['speedup']:.2f}× faster than everything first and hides "
        f"{100 * summary['hidden']:.0f} % of the smaller of fetch and recompute"
    )
    return summary


def predict(strategy: Strategy, fetch_ms: float, recompute_ms: float) -> float:
    """The pure schedule's TTFT of one such request, from the measured parts."""
    kv_row, e_row = 2.0, 1.0
    unit_ms = fetch_ms / (kv_row * (NUM_LAYERS - len(BLOCK)) + e_row)
    request = Request(
        block=BLOCK,
        load=(kv_row * unit_ms,) * NUM_LAYERS,
        recompute=(recompute_ms / len(BLOCK),) * NUM_LAYERS,
        e_load=e_row * unit_ms,
    )
    return schedule([request], strategy).ttfts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--codec", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = result.here()
    setup = Setup(
        num_shared=NUM_SHARED,
        num_documents=args.documents,
        dtype=args.dtype,
        codec=args.codec,
        sends={"capture_layers": [BLOCK.start]},
        reads={"forward_wait_s": 2},
    )
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder), setup) as it:
        publish(it)
        summary: dict[str, Any] = {"speed": report_speed(speed(it))}
        mirror(it, BLOCK)
        it.sender.stop()
        time.sleep(0.5)
        rows_moved = 2 * (NUM_LAYERS - len(BLOCK)) + 1
        bytes_moved = rows_moved * HIDDEN * NUM_SHARED * (4 if args.dtype == "float32" else 2)
        balanced = bytes_moved / (summary["speed"]["block"]["recompute_ms"] / 1000)
        summary["throttled"] = [
            report_throttled(rate, throttled(it, rate))
            for rate in (balanced / 2, balanced, balanced * 2)
        ]
    summary |= {"dtype": args.dtype, "codec": args.codec}
    result.write("partial_prefill", summary, environment, args.json)


if __name__ == "__main__":
    main()
