"""How much slower or faster is a shared storage than this project's own transport?

    python -m benchmarks.shared_tier [--from transport file mooncake] [--documents 8]

Two servers run one randomly initialised model of 12 layers × 768. The receiver loads all layers of
1,000-token documents that the sender has read. With `transport`, the bytes cross a TCP connection
as between two hosts. With `file` and `mooncake` they pass through SGLang's HiCache backends;
Mooncake runs its own master, over TCP, if its wheel is installed. Requests that load alternate with
full prefills (`off`) of the same documents, and their answers are compared before their times. The
server learns its speeds from the first two documents; medians are taken over the others.

Physics: the transport moves bytes once. To a storage, the sender writes them first, which we do not
time. The receiver asks the storage for every page, and each page and layer is an object that it
copies out of a buffer and checks. Transport and storages read the same bytes. GB/s are bytes over
the time of the fetch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.relay import (
    Sample,
    Setup,
    bench,
    in_turns,
    median,
    paired_ratio,
    publish,
    ttft,
)
from sglang_droidspeak.fleet.servers import ProgramSpec, free_port, running

NUM_SHARED = 1000
WRITTEN_S = 5.0
"""Seconds that a storage gets to write the sender's KV in the background."""
TRANSPORT = "transport"

Settings = Mapping[str, Any]


@contextlib.contextmanager
def storage(name: str, folder: Path) -> Iterator[Settings]:
    """Yield both servers' settings for this storage, while the storage's processes run."""
    if name == TRANSPORT:
        yield {"shared_memory": False}
    elif name == "file":
        config: Settings = {"file_storage_path": str(folder / "store")}
        yield {"hicache_backend": name, "hicache_config": config}
    else:
        port, metrics = free_port(), free_port()
        command = ["mooncake_master", f"-rpc_port={port}", "-rpc_address=127.0.0.1"]
        command += [f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"]
        with running(ProgramSpec(command=command, port=port, name="master"), folder=folder):
            config = {
                "master_server_address": f"127.0.0.1:{port}",
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 1 << 30,
            }
            yield {"hicache_backend": name, "hicache_config": config}


def measured(name: str, folder: Path, num_documents: int) -> dict[str, Any]:
    """Measure fetches from one storage, beside full prefills."""
    with storage(name, folder) as settings:
        setup = Setup(
            num_shared=NUM_SHARED,
            num_documents=num_documents,
            is_one_model=True,
            sends=settings,
            reads=settings if name == TRANSPORT else {**settings, "peers": []},
        )
        with bench(folder, setup) as testbed:
            publish(testbed)
            time.sleep(WRITTEN_S)
            samples = in_turns(testbed)
    for sample in samples["auto"]:
        provenance = sample.provenance
        assert provenance["outcome"] == "reused", provenance
        assert provenance["location"].startswith("tcp" if name == TRANSPORT else "hicache"), (
            provenance
        )
    return {
        "where": name,
        "documents": len(samples["auto"]),
        "fetched_mb": median(samples["auto"], "fetched_bytes") / 1e6,
        "gb_per_s": median(samples["auto"], gb_per_s),
        "ttft_p50_ms": median(samples["auto"], ttft),
        "off_ttft_p50_ms": median(samples["off"], ttft),
        "paired_ratio": paired_ratio(samples),
    }


def gb_per_s(sample: Sample) -> float:
    provenance = sample.provenance
    return provenance["fetched_bytes"] / provenance["fetch_ms"] / 1e6


def available() -> list[str]:
    """Return the storages that run on this machine: Mooncake only if its wheel is installed."""
    has_mooncake = importlib.util.find_spec("mooncake") and shutil.which("mooncake_master")
    return [TRANSPORT, "file", *(["mooncake"] if has_mooncake else [])]


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--from", dest="names", nargs="+", default=available())
    parser.add_argument("--documents", type=int, default=8)
    args = parser.parse_args()
    environment = result.here()
    rows = []
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, Path(folder), args.documents))
    rows = result.with_others(rows, "where", environment, args.json)
    results = {"tokens": NUM_SHARED, "rows": rows}
    result.write("shared_tier", results, environment, args.json)


if __name__ == "__main__":
    main()
