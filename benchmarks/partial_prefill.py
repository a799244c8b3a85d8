"""How much earlier is the first token with another model's KV, and what limits the gain?

    python -m benchmarks.partial_prefill [--documents 7] [--dtype float32] [--codec none]

Two real servers run randomly initialised models of 12 layers × 768 and read a 2,000-token document.
The receiver loads nine layers from the sender over loopback and recomputes three, [4, 7).

Physics: a full prefill computes 12 layers for every token. The recompute computes two layers and
the K and V projections of the third, about 2.1/12 of the work. The ideal time is that share of the
full prefill plus the forward over the new tokens, which attends over the prefix in every layer.
Overhead is added: matching, fetching, copying into slots, scheduling. Each server computes with one
thread, so that on two cores the other core moves the bytes. The contenders take turns on the same
documents, and their answers are compared before their times. In float32 without a codec, an answer
must agree with an oracle's by the same plan. With all layers recomputed, it must equal full
prefill's.

The second part paces the link between the two with the transport's own bandwidth cap. It compares
the strategies of the paper: load everything first, load only the reused layers first, or pipeline
loads and recompute. For the pipeline, `schedule.py` predicts the time from those of fetch and
recompute.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.random_servers import BLOCK, HIDDEN, NUM_LAYERS
from benchmarks.relay import (
    NUM_NEW,
    Bench,
    Setup,
    asked,
    bench,
    compare_outputs,
    median,
    mirror,
    paced,
    publish,
    ttft,
)
from benchmarks.schedule import Request, ttfts
from cachetree import EMPTY_SPAN, Span
from cachetree.planning import Strategy

NUM_SHARED = 2000
NUM_PACED = 4
"""Number of documents that are asked about over each link. The first one warms up."""
NAMED = {"block": f"{BLOCK.start}:{BLOCK.stop}"}
CONDITIONS: Mapping[str, Mapping[str, str]] = {
    "full prefill": {"mode": "off"},
    "full reuse": {"block": "none"},
    f"block [{BLOCK.start}, {BLOCK.stop})": NAMED,
    "all layers": {"block": "all"},
}
FULL, REUSE, BLOCK_ONLY, ALL = CONDITIONS
PLANS = {REUSE: EMPTY_SPAN, BLOCK_ONLY: BLOCK, ALL: Span(0, NUM_LAYERS)}
PARTS = ("match_ms", "queued_ms", "fetch_ms", "load_ms", "recompute_ms", "forward_ms")
STRATEGIES = (Strategy.EVERYTHING_FIRST, Strategy.REUSED_FIRST, Strategy.PIPELINED)


def speed(testbed: Bench) -> dict[str, Any]:
    """Measure every way of `CONDITIONS` on every document."""
    samples = asked(testbed, CONDITIONS)
    for name, of in samples.items():
        outcomes = {sample.outcome for sample in of}
        assert outcomes == {"off" if name == FULL else "reused"}, (name, outcomes)
    for full, again in zip(samples[FULL], samples[ALL], strict=True):
        assert full.token == again.token, "all layers recomputed must answer as a full prefill"
    full_ms = median(samples[FULL], ttft)
    rows = [
        {
            "condition": name,
            "ttft_p50_ms": median(of, ttft),
            "speedup": full_ms / median(of, ttft),
            **({} if name == FULL else {part: median(of, part) for part in PARTS}),
        }
        for name, of in samples.items()
    ]
    block = rows[list(CONDITIONS).index(BLOCK_ONLY)]
    ideal_ms = full_ms * share_computed() + block["forward_ms"]
    return {
        "rows": rows,
        "recompute_ms": block["recompute_ms"],
        "ideal_ms": ideal_ms,
        "over_ideal": block["ttft_p50_ms"] / ideal_ms,
    }


def share_computed() -> float:
    """Return the share of all layers' multiplications that the block takes: its full layers, and K
    and V of its last layer."""
    mlp = HIDDEN * 8 // 3 // 64 * 64
    kv = 2 * HIDDEN * HIDDEN
    layer = kv + 2 * HIDDEN * HIDDEN + 3 * HIDDEN * mlp + HIDDEN * NUM_SHARED
    return (len(BLOCK) - 1 + kv / layer) / NUM_LAYERS


def throttled(testbed: Bench, bytes_per_s: float) -> dict[str, Any]:
    """Measure each strategy over a link of this rate, and predict the time of the pipeline."""
    arms = {strategy.value: {**NAMED, "strategy": strategy.value} for strategy in STRATEGIES}
    with paced(testbed, bytes_per_s, CONDITIONS[REUSE]):
        samples = asked(testbed, arms)
    for same in zip(*samples.values(), strict=True):
        assert {sample.outcome for sample in same} == {"reused"}, same
        assert len({sample.token for sample in same}) == 1, "strategies must agree"
    first = samples[Strategy.REUSED_FIRST.value]
    fetch_ms, recompute_ms = median(first, "fetch_ms"), median(first, "recompute_ms")
    base_ms = median(first, ttft) - fetch_ms - recompute_ms
    medians = {f"{name}_ms": median(of, ttft) for name, of in samples.items()}
    pipelined_ms = medians["pipelined_ms"]
    hidden_ms = fetch_ms + recompute_ms + base_ms - pipelined_ms
    return {
        "mb_per_s": bytes_per_s / 1e6,
        **medians,
        "predicted_ms": base_ms + predict(fetch_ms, recompute_ms),
        "speedup": medians["everything_first_ms"] / pipelined_ms,
        "hidden": hidden_ms / min(fetch_ms, recompute_ms),
    }


def predict(fetch_ms: float, recompute_ms: float) -> float:
    """Predict how long fetch and recompute take in a pipeline, from the time of each."""
    row_ms = fetch_ms / (2 * (NUM_LAYERS - len(BLOCK)) + 1)  # K and V of each loaded layer, and E.
    request = Request(
        block=BLOCK,
        num_layers=NUM_LAYERS,
        load=2 * row_ms,
        recompute=recompute_ms,
        e_load=row_ms,
    )
    (ttft_ms,) = ttfts([request], Strategy.PIPELINED)
    return ttft_ms


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--codec", default="none", choices=["none", "int8", "int4"])
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
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder), setup) as testbed:
        publish(testbed)
        if (args.dtype, args.codec) == ("float32", "none"):
            answers = [
                compare_outputs(testbed, CONDITIONS[name], span) for name, span in PLANS.items()
            ]
            assert answers[0] != answers[1] != answers[2], "the comparison would notice nothing"
        results = speed(testbed)
        mirror(testbed, BLOCK)
        testbed.sender.stop()
        time.sleep(0.5)
        rows_moved = 2 * (NUM_LAYERS - len(BLOCK)) + 1
        bytes_moved = rows_moved * HIDDEN * NUM_SHARED * (4 if args.dtype == "float32" else 2)
        balanced = bytes_moved / results["recompute_ms"] * 1000
        few = replace(testbed, documents=testbed.documents[:NUM_PACED])
        results["links"] = [throttled(few, balanced * share) for share in (0.5, 1, 2)]
    sizes = {"documents": args.documents - 1, "tokens": NUM_SHARED, "new_tokens": NUM_NEW}
    results |= {**sizes, "dtype": args.dtype, "codec": args.codec}
    result.write("partial_prefill", results, environment, args.json)


if __name__ == "__main__":
    main()
