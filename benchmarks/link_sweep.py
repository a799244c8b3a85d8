"""Does reuse cost anything on real servers if the link is too slow for it?

    python -m benchmarks.link_sweep [--documents 8] [--json benchmarks/results/link_sweep.json]

Two servers run one randomly initialised model of 12 layers × 768. The receiver may load all layers
of a 1,000-token document from a relay. We pace the link to one rate after the other, from fast to
slow. At each rate, requests for which the server chooses (mode `auto`) alternate with full prefills
(`off`) of the same documents. We compare their answers before their times. The server learns the
rate from the first two requests; medians are taken over the others.

Physics: a full prefill takes t, and the document's KV of b bytes takes t' = b / rate. A plan is
used if it is faster, t' < t. On slower links `auto` must behave like `off` and wait for nothing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.relay import (
    Sample,
    Setup,
    bench,
    counts,
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


def row(mb_per_s: float, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    off, auto = (median(samples[mode], ttft) for mode in ("off", "auto"))
    return {
        "mb_per_s": mb_per_s,
        "off_ttft_p50_ms": off,
        "auto_ttft_p50_ms": auto,
        "ratio": auto / off,
        "paired_ratio": paired_ratio(samples),
        "outcomes": counts(samples["auto"]),
    }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=8)
    args = parser.parse_args()
    environment = result.here()
    setup = Setup(num_shared=NUM_SHARED, num_documents=args.documents, is_one_model=True)
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder), setup) as testbed:
        publish(testbed)
        for document in range(
            len(testbed.documents)
        ):  # The server learns its own speed from these.
            testbed.ask(document, {"mode": "off"})
        mirror(testbed, EMPTY_SPAN)
        testbed.sender.stop()
        time.sleep(0.5)
        rates = []
        for mb_per_s in MB_PER_S:
            with paced(testbed, mb_per_s * 1e6, {}):
                rates.append(row(mb_per_s, in_turns(testbed)))
    result.write("link_sweep", {"rates": rates}, environment, args.json)


if __name__ == "__main__":
    main()
