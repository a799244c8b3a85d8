"""Real servers: replicas of a receiver, with the extension and without, and a worker beside them.

The sender reads every document once, and the worker copies its KV. Replicas of the receiver with
the extension read from the worker; as many replicas run SGLang alone. Each replica computes with
one thread. Requests of one kind go to its replicas in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.random_servers import ENV, PAGE, family_of, options, profile_of
from cachetree import Cache, CacheConfig, Family
from cachetree.checkpoint import read_model_identity
from cachetree.planning import BlockQuality, write_profile
from cachetree.tree import page_hashes
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.fleet.servers import (
    Process,
    Server,
    ServerSpec,
    WorkerSpec,
    free_port,
    running,
)

from .client import Ask

STORED_S = 60.0


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the models and of the requests, and the length of a run."""

    layers: int
    hidden: int
    heads: int
    block: tuple[int, int]
    """Layers that the receiver recomputes; `wide_block` if it has time for more."""
    wide_block: tuple[int, int]
    num_replicas: int
    num_documents: int
    document_tokens: int
    question_tokens: int
    new_tokens: int
    num_requests: int
    """Number of requests of each contender at each rate."""
    loads: tuple[float, ...]
    """Rates, as shares of the replicas' capacity by full prefill."""
    more_loads: tuple[float, ...]
    """Further rates for contenders that reuse."""
    burst_loads: tuple[float, ...]
    """Rates of the runs in which the rate doubles, or requests come in bursts."""

    @property
    def pool_tokens(self) -> int:
        """Tokens of a replica's KV pool. The pool holds fewer than half of the documents. So no
        replica has a document in its own cache when the next request for it comes."""
        return int(0.4 * self.num_documents * (self.document_tokens + self.question_tokens))

    def write(self, folder: Path, names: Sequence[str]) -> list[Path]:
        """Write models of this size."""
        sizes = {"layers": self.layers, "hidden": self.hidden}
        config = shape("llama", **sizes, heads=self.heads, kv_heads=self.heads)
        return write_models(folder, config, names)


FULL = Size(
    layers=12,
    hidden=768,
    heads=12,
    block=(4, 7),
    wide_block=(2, 9),
    num_replicas=2,
    num_documents=24,
    document_tokens=500,
    question_tokens=24,
    new_tokens=8,
    num_requests=48,
    loads=(0.5, 0.9, 1.1),
    more_loads=(2.0, 3.5),
    burst_loads=(0.5, 0.8),
)
QUICK = Size(
    layers=6,
    hidden=256,
    heads=4,
    block=(2, 4),
    wide_block=(2, 5),
    num_replicas=1,
    num_documents=6,
    document_tokens=256,
    question_tokens=16,
    new_tokens=4,
    num_requests=6,
    loads=(0.9,),
    more_loads=(),
    burst_loads=(0.9,),
)


@dataclass(frozen=True, kw_only=True)
class Rig:
    size: Size
    worker: Process
    """Worker that holds the KV of every document, as the sender computed it."""
    sender: Server
    alone: Sequence[Server]
    """Replicas of SGLang without the extension."""
    reusing: Sequence[Server]
    documents: Sequence[Sequence[int]]
    """Prompts, each with a document and its question."""
    family: Family

    def ask(
        self, number: int, document: int, at_s: float, controls: Mapping[str, Any] | None
    ) -> Ask:
        """Build the request with this number. Replicas take turns. A request without controls goes
        to SGLang alone."""
        return Ask(
            at_s=at_s,
            url=self.replica(number, controls).url,
            document=document,
            tokens=self.documents[document],
            num_new=self.size.new_tokens,
            controls=controls,
        )

    def replica(self, number: int, controls: Mapping[str, Any] | None) -> Server:
        replicas = self.alone if controls is None else self.reusing
        return replicas[number % len(replicas)]

    def flush(self) -> None:
        for server in (*self.alone, *self.reusing):
            server.flush()

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Have the sender read the prompts; return once the worker has them."""
        for prompt in prompts:
            self.sender.generate(prompt, max_new_tokens=1)
        with self.reader() as cache:
            until_stored(cache, prompts)

    def reader(self) -> Cache:
        """Open a cache that reads from the worker."""
        return Cache(self.family, CacheConfig(peers=(self.worker.address,), serves=False))


def until_stored(cache: Cache, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until the cache knows every page of the prompts."""
    deadline = time.monotonic() + STORED_S
    for prompt in prompts:
        pages = page_hashes(prompt, PAGE)
        while not any(it.num_pages == len(pages) for it in cache.match(pages)):
            assert time.monotonic() < deadline, "the worker did not get every document"
            time.sleep(0.05)


@contextmanager
def rig(folder: Path, size: Size, say: Callable[[str], None]) -> Iterator[Rig]:
    sender, receiver = size.write(folder, ["sender", "receiver"])
    profile = write_profile_of(sender, receiver, size)
    small = options(max_total_tokens=max(1024, size.pool_tokens))
    settings: dict[str, Any] = {
        "gate": "none",
        "fetch_deadline_s": 60,
        "host_gb": 0,
        "profiles": [str(profile)],
    }
    listen, senders = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    e_layers = sorted({size.block[0], size.wide_block[0]})
    holding = WorkerSpec(config=_worker(receiver, size, listen, senders))
    sends = {"listen": senders, "capture_layers": e_layers, "host_gb": 1}
    replicas = {
        name: [
            ServerSpec(model=receiver, name=f"{name}-{i}", options=small, droidspeak=droidspeak)
            for i in range(size.num_replicas)
        ]
        for name, droidspeak in (("alone", None), ("reusing", {**settings, "peers": [listen]}))
    }
    writing = ServerSpec(
        model=sender,
        name="sender",
        options=options(max_total_tokens=8192),
        droidspeak=sends,
    )
    specs = (writing, *replicas["alone"], *replicas["reusing"])
    say("servers start")
    prefixes = [random_prompt(size.document_tokens, seed=i) for i in range(size.num_documents)]
    questions = [random_prompt(size.question_tokens, 9000 + i) for i in range(size.num_documents)]
    with (
        running(holding, folder=folder / "worker") as (worker,),
        running(*specs, folder=folder / "logs", env=ENV) as (server, *others),
    ):
        testbed = Rig(
            size=size,
            worker=worker,
            sender=server,
            alone=others[: size.num_replicas],
            reusing=others[size.num_replicas :],
            documents=[[*of, *asked] for of, asked in zip(prefixes, questions, strict=True)],
            family=family_of(receiver),
        )
        say("the sender reads every document")
        testbed.read(prefixes)
        yield testbed


def _worker(model: Path, size: Size, listen: str, senders: str) -> dict[str, Any]:
    row_bytes = size.hidden * 4
    token_bytes = row_bytes * (2 * size.layers + 2)
    return {
        "family": {"model": str(model), "kv_dtype": "float32", "page_size": PAGE},
        "cache": {
            "host_bytes": int(1.3 * token_bytes * size.num_documents * size.document_tokens),
            "worker": {"listen": listen},
            "keeps": [senders],
        },
    }


def write_profile_of(sender: Path, receiver: Path, size: Size) -> Path:
    """Write a made-up profile beside the receiver. It has two blocks; the wider block answers a
    little better."""
    blocks = tuple(
        BlockQuality(start=start, stop=stop, quality=quality)
        for (start, stop), quality in ((size.wide_block, 0.9), (size.block, 0.88))
    )
    path = receiver.parent / f"{sender.name}_to_{receiver.name}.json"
    write_profile(profile_of(*map(read_model_identity, (sender, receiver)), *blocks), path)
    return path
