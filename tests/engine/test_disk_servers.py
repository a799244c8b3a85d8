"""A server that keeps its cache on disk finds it again after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_parts import (
    CPU,
    PAGE,
    SLOW_DEVICE,
    Answer,
    answer,
    eventually,
    family_of,
    prompt,
    whole_pages,
)
from forked import ServerSpec

from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import running

pytestmark = pytest.mark.server

TOKENS = prompt(300, seed=3)
LAYERS = 4


def ask(model: Path, disk: Path, logs: Path) -> Answer:
    """The answer of a fresh server, which is ended once it has written the prompt's KV to disk."""
    spec = ServerSpec(
        model=model,
        name="server",
        options=CPU,
        droidspeak={"disk_path": str(disk), "disk_gb": 0.1, "host_gb": 0.05},
    )
    least = whole_pages(len(TOKENS)) // PAGE * LAYERS * family_of(model).kv_page_bytes
    before = size_of(disk)
    with running(spec, folder=logs, env=SLOW_DEVICE) as (server,):
        reply = answer(server, TOKENS)
        if reply.provenance["outcome"] != "own":
            eventually(lambda: size_of(disk) >= before + least)
    return reply


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_restart_finds_the_cache_again(tmp_path: Path) -> None:
    config = shape("llama", layers=LAYERS, hidden=256, heads=4, kv_heads=2)
    (model,) = write_models(tmp_path, config, ["model"])
    disk = tmp_path / "disk"
    first = ask(model, disk, tmp_path / "first")
    assert first.provenance["reused_tokens"] == 0
    again = ask(model, disk, tmp_path / "again")
    assert again.provenance["outcome"] == "own"
    assert again.provenance["reused_tokens"] == whole_pages(len(TOKENS))
    assert again.provenance["exact"]
    assert again.ids == first.ids
