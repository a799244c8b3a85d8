"""`cachetree bench`: how fast this machine reads from a worker."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

import msgspec

from cachetree.cli.ask import add_worker, answer_to, positive
from cachetree.cli.show import show, show_json
from cachetree.clock import Deadline
from cachetree.errors import ConfigError, DeadlineExceeded
from cachetree.ids import Kind, Location, Step
from cachetree.memory import Staging
from cachetree.transport import Peer, PeerConfig, verbs
from cachetree.tree import CacheTree


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds; rates in 10^9 bytes per second."""

    address: str
    model: str
    fetch_bytes: int
    num_fetches: int
    round_trip_ms: dict[str, float]
    """To fetch one layer of one page: `p50`, `p90`, `p99`."""
    gb_per_s: dict[str, float]
    """`p10`, `p50`, `p90`."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure round trip and bandwidth from this machine to a worker",
        description="Fetches what the worker holds, the longest entry at most --mib of it, again "
        "and again into the same memory.",
    )
    add_worker(bench)
    bench.add_argument("--mib", type=positive, default=64.0, help="most of one fetch")
    bench.add_argument("--num", type=int, default=20, metavar="N", help="fetches to measure")
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.num <= 0:
        raise ConfigError(f"num is {args.num}; it must be above 0")
    result = measure(args)
    if args.json:
        show_json(result)
        return
    show(f"{result.num_fetches} fetches of {result.fetch_bytes} bytes of model {result.model}")
    show("round trip   " + "   ".join(f"{k} {v:.2f} ms" for k, v in result.round_trip_ms.items()))
    show("bandwidth    " + "   ".join(f"{k} {v:.2f} GB/s" for k, v in result.gb_per_s.items()))


def measure(args: argparse.Namespace) -> Result:
    family = answer_to(args, verbs.StatusRequest(), verbs.Status).family
    if family is None:
        raise ConfigError(f"{args.address} does not tell its family; update that worker")
    most_bytes = int(args.mib * (1 << 20))
    num_pages = max(1, most_bytes // (family.num_layers * family.kv_page_bytes))
    tree = CacheTree(family, host_bytes=2 * most_bytes + (1 << 20))
    config = PeerConfig(key_file=args.key_file, server_key=args.server_key)
    with closing(Peer(tree, Location(args.address), config)) as peer:
        if not peer.wait_ready(args.timeout):
            raise peer.error or DeadlineExceeded(f"{args.address} was not ready in time")
        longest = tree.remote.longest(peer.address)
        if longest is None:
            raise ConfigError(f"{args.address} holds nothing to read; send an engine a prompt")
        model, pages = longest.model, longest.pages[:num_pages]

        def seconds(num_pages: int, num_layers: int) -> float:
            sizes = {
                Step(Kind.KV, layer): num_pages * family.kv_page_bytes
                for layer in range(num_layers)
            }
            staging = Staging(sizes, Deadline.after(args.timeout))
            begun_at_s = time.perf_counter()
            peer.fetch(model, pages[:num_pages], staging)
            for step in staging.steps:
                staging.wait(step)
            return time.perf_counter() - begun_at_s

        whole = len(pages), family.num_layers
        seconds(*whole)  # Also touches what is not there yet.
        small = [1000 * seconds(1, 1) for _ in range(args.num)]
        large = [seconds(*whole) for _ in range(args.num)]
    num_bytes = len(pages) * family.num_layers * family.kv_page_bytes
    return Result(
        address=args.address,
        model=model,
        fetch_bytes=num_bytes,
        num_fetches=args.num,
        round_trip_ms=_percentiles(small, (50, 90, 99)),
        gb_per_s=_percentiles([num_bytes / it / 1e9 for it in large], (10, 50, 90)),
    )


def _percentiles(values: Sequence[float], wanted: Sequence[int]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else None
    return {f"p{it}": round(cuts[it - 1] if cuts else values[0], 4) for it in wanted}
