"""Does reuse cost anything where the link is too slow for it, on real servers?

    python -m benchmarks.link_sweep [--documents 8] [--json benchmarks/results/link_sweep.json]

Two servers of one randomly initialised model of 12 layers × 768; the receiver may load all layers
of a 1,000-token document from a relay, over a link that is paced to one rate after the other, from
fast to slow. At each rate requests of mode `auto` alternate with full prefills (`off`) on the same
documents, and their answers are compared before their times. The first two of a rate are the ones
from which the server learns it; medians are of the others.

Physics: a full prefill takes t, the document's KV of b bytes t' = b / rate. A plan is used where it
saves more than its request waits, t' < t / 2; beyond that `auto` must do as `off` does, and waits
for nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import result
from benchmarks.relay import (
    Sample,
    Setup,
    bench,
    console,
    in_turns,
    median,
    mirror,
    paced,
    paired_ratio,
    publish,
    ttft,
)
from cachetree import EMPTY_SPAN

NUM_SHARED = 1000
MB_PER_S = (2000, 400, 200, 120, 60, 20, 5, 1)


def report(found: dict[float, dict[str, list[Sample]]]) -> list[dict[str, Any]]:
    table = Table(title=f"TTFT of {NUM_SHARED} shared tokens by the link's rate, medians in ms")
    for column in ("MB/s", "off", "auto", "auto / off", "pairs' median", "outcomes of auto"):
        table.add_column(column, justify="right")
    rows = []
    for mb_per_s, samples in found.items():
        off, auto = (median(samples[mode], ttft) for mode in ("off", "auto"))
        paired = paired_ratio(samples)
        outcomes = [sample.provenance["outcome"] for sample in samples["auto"]]
        counts = {it: outcomes.count(it) for it in sorted(set(outcomes))}
        rows.append(
            {
                "mb_per_s": mb_per_s,
                "off_ttft_p50_ms": off,
                "auto_ttft_p50_ms": auto,
                "ratio": auto / off,
                "paired_ratio": paired,
                "outcomes": counts,
            }
        )
        cells = (f"{mb_per_s}", f"{off:.0f}", f"{auto:.0f}", f"{auto / off:.3f}", f"{paired:.3f}")
        table.add_row(*cells, ", ".join(f"{num} {name}" for name, num in counts.items()))
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = result.here()
    setup = Setup(num_shared=NUM_SHARED, num_documents=args.documents, is_one_model=True)
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder), setup) as it:
        publish(it)
        for document in range(len(it.documents)):  # From which its own speed is learned.
            it.ask(document, {"mode": "off"})
        mirror(it, EMPTY_SPAN)
        it.sender.stop()
        time.sleep(0.5)
        found = {}
        for mb_per_s in MB_PER_S:
            with paced(it, mb_per_s * 1e6, {}):
                found[mb_per_s] = in_turns(it)
    result.write("link_sweep", {"rates": report(found)}, environment, args.json)


if __name__ == "__main__":
    main()
