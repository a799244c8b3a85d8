"""Does reuse cost anything where the link is too slow for it, on real servers?

    python benchmarks/link_sweep.py [--documents 8] [--json benchmarks/results/link_sweep.json]

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
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import result
from partial_prefill import HIDDEN, NUM_LAYERS, PAGE, Bench, Sample, median, publish, ttft
from rich.console import Console
from rich.table import Table

from cachetree import (
    EMPTY_SPAN,
    Cache,
    CacheConfig,
    Deadline,
    Family,
    Kind,
    Plan,
    Span,
    Step,
    Worker,
    WorkerConfig,
)
from cachetree.checkpoint import Codec, read_model_identity
from cachetree.tree import page_hashes
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import ServerSpec, free_port, running

NUM_SHARED = 1000
NUM_LEARNING = 2
MB_PER_S = (2000, 400, 200, 120, 60, 20, 5, 1)
console = Console(width=100)


@contextmanager
def bench(folder: Path, num_documents: int) -> Iterator[Bench]:
    config = shape("llama", layers=NUM_LAYERS, hidden=HIDDEN, heads=12, kv_heads=12)
    (path,) = write_models(folder, config, ["model"])
    options = {
        "dtype": "float32",
        "page-size": PAGE,
        "max-total-tokens": 8 * NUM_SHARED,
        "max-running-requests": 4,
        "chunked-prefill-size": 4096,
        "sleep-on-idle": True,
        "device": "cpu",
    }
    direct, relayed = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    sends = {"listen": direct, "host_gb": 4}
    reads = {"peers": [direct, relayed], "gate": "off", "host_gb": 0, "fetch_deadline_s": 60}
    specs = [
        ServerSpec(model=path, name=name, options=options, droidspeak=droidspeak)
        for name, droidspeak in (("sender", sends), ("receiver", reads))
    ]
    family = Family.of(
        read_model_identity(path),
        model_dtype="float32",
        kv_dtype="float32",
        page_size=PAGE,
        codec=Codec.NONE,
        tp_size=1,
        tp_rank=0,
    )
    documents = [random_prompt(NUM_SHARED, seed=i) for i in range(num_documents)]
    with (
        console.status("starting two servers"),
        running(*specs, folder=folder / "logs", env={"OMP_NUM_THREADS": "1"}) as (s, r),
        Cache(family, CacheConfig(peers=(direct,), serves=False)) as relay,
    ):
        yield Bench(s, r, relay, relayed, documents)


def mirror(it: Bench) -> None:
    """Copy the sender's KV into the relay."""
    for document in it.documents:
        pages = page_hashes(document, PAGE)
        (match,) = it.relay.match(pages)
        plan = Plan(
            sender=match.model,
            receiver=match.model,
            location=match.location,
            pages=Span(0, len(pages)),
            block=EMPTY_SPAN,
            num_layers=NUM_LAYERS,
        )
        staging = it.relay.fetch(plan, pages, Deadline.after(60))
        assert staging is not None
        with staging:
            for step in plan.steps:
                staging.wait(step)
            kv = [staging.view(Step(Kind.KV, layer)) for layer in range(NUM_LAYERS)]
            assert it.relay.store(match.model, None, pages, kv, {})


@contextmanager
def paced(it: Bench, mb_per_s: float) -> Iterator[None]:
    """Serve the relay's entries at that rate until the receiver knows them."""
    config = WorkerConfig(listen=it.relay_address, max_bytes_per_s=mb_per_s * 1e6)
    worker = Worker(it.relay.tree, config)
    try:
        deadline = time.monotonic() + 30
        while it.ask(0, {}).provenance["outcome"] == "no_match":
            assert time.monotonic() < deadline, "the receiver did not find the relay"
            time.sleep(0.2)
        yield
    finally:
        worker.close()
        time.sleep(0.2)


def measured(it: Bench, mb_per_s: float) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {"off": [], "auto": []}
    with paced(it, mb_per_s):
        for document in range(len(it.documents)):
            order = ("off", "auto") if document % 2 else ("auto", "off")
            for mode in order:
                samples[mode].append(it.ask(document, {"mode": mode}))
    for pair in zip(*samples.values(), strict=True):
        assert len({sample.token for sample in pair}) == 1, "exact reuse answers as a full prefill"
    return {mode: of[NUM_LEARNING:] for mode, of in samples.items()}


def report(found: dict[float, dict[str, list[Sample]]]) -> list[dict[str, Any]]:
    table = Table(title=f"TTFT of {NUM_SHARED} shared tokens by the link's rate, medians in ms")
    for column in ("MB/s", "off", "auto", "auto / off", "pairs' median", "outcomes of auto"):
        table.add_column(column, justify="right")
    rows = []
    for mb_per_s, samples in found.items():
        off, auto = (median(samples[mode], ttft) for mode in ("off", "auto"))
        pairs = zip(samples["auto"], samples["off"], strict=True)
        paired = statistics.median(one.ttft_ms / other.ttft_ms for one, other in pairs)
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
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder), args.documents) as it:
        publish(it)
        for document in range(len(it.documents)):  # From which its own speed is learned.
            it.ask(document, {"mode": "off"})
        mirror(it)
        it.sender.stop()
        time.sleep(0.5)
        found = {mb_per_s: measured(it, mb_per_s) for mb_per_s in MB_PER_S}
    result.write("link_sweep", {"rates": report(found)}, environment, args.json)


if __name__ == "__main__":
    main()
