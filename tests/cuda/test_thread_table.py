"""The table in docs/development.md has the threads of a running server and its worker."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import engine_on_cuda
from engine_on_cuda import PAGE, fork, load, on_device
from msgspec.structs import replace
from virtual_cuda import ROOT, VirtualCuda

from cachetree import Cache, CacheConfig, Deadline, PeerConfig, Plan, Span
from profiles.random_models import shape, write_models
from sglang_droidspeak import linker
from sglang_droidspeak.fleet.servers import free_port

TOKENS = list(range(4, 4 + 2 * PAGE))


def running(folder: Path) -> list[str]:
    """Return the names of the threads of a server that has all kinds, while a peer reads from
    it."""
    (model,) = write_models(folder, shape("llama", layers=2, hidden=64, heads=1, kv_heads=1), ["m"])
    runner, port = load(model), free_port()
    before = {*threading.enumerate()}
    server_of = engine_on_cuda._server

    def server(*args: Any) -> Any:
        this_server = server_of(*args)
        more = {"listen": "tcp://127.0.0.1:0", "http": port, "disk_gb": 2**-6}
        more |= {"disk_path": str(folder / "disk"), "hicache_backend": "file"}
        more |= {"hicache_config": {"file_storage_path": str(folder / "hicache")}}
        more |= {"peers": ("tcp://127.0.0.1:1", f"dns://localhost:{free_port()}")}
        return dataclasses.replace(this_server, settings=replace(this_server.settings, **more))

    with (
        patch.object(engine_on_cuda, "_server", server),
        patch.object(linker, "get_observability", lambda: SimpleNamespace(enable_metrics=True)),
        on_device(runner, model, (1,), VirtualCuda()) as engine,
    ):
        engine.linker._pool_index.is_read = False  # There is no tree of SGLang.
        pages = engine.store(TOKENS, engine.slots(PAGE, 2 * PAGE))
        address = engine.cache.address
        config = CacheConfig(
            host_bytes=1 << 20,
            staging_bytes=1 << 20,
            serves=False,
            peers=(address,),
            peer=PeerConfig(shared_memory=False),
        )
        with Cache(engine.cache.family, config) as reader:
            while not reader.match(pages):
                time.sleep(0.005)
            plan = Plan(
                sender=engine.model,
                receiver=engine.model,
                location=address,
                pages=Span(0, len(pages)),
                block=Span(0, 0),
                num_layers=engine.num_layers,
            )
            staging = reader.fetch(plan, pages, Deadline.after(10))
            for step in staging.steps:
                staging.wait(step)
            engine.linker._models.reader.submit(int).result()
            with socket.create_connection(("127.0.0.1", port)):
                while "cachetree-http-answer" not in (names := named(before)):
                    time.sleep(0.005)
        engine.close()
    return names


def named(before: set[threading.Thread]) -> list[str]:
    """Return the names of threads, without the addresses and numbers at their ends."""
    new = {*threading.enumerate()} - before
    return sorted({it.name.partition(" ")[0].removesuffix("_0") for it in new})


def test_every_thread_is_in_the_table_by_name(tmp_path):
    page = (ROOT / "docs/development.md").read_text().partition("## Threads")[2]
    assert fork(partial(running, tmp_path), list[str]) == sorted(
        re.findall(r"(?m)^\| `([\w-]+)` \|", page)
    )
