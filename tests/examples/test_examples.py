"""The examples, run by hand as the README shows: two servers, curl, OpenAI, a frontend program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_droidspeak.servers import Server, free_port, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PORTS = ("30000", "30001", "30010")
CPU = "\ndevice: cpu\n"
"""What the README says to add where there is no accelerator."""

ENV = {"SGLANG_TORCH_CPU_START": "fork"}

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class ExampleSpec:
    """A server started from an example's own YAML, but for its ports."""

    name: str
    port: int
    text: str

    host: str = "127.0.0.1"
    wrapper: tuple[str, ...] = ()

    def yaml(self) -> str:
        return self.text

    def start(self, folder: Path, env: Mapping[str, str]) -> Server:
        return Server(self, folder, env)


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    ports = {port: str(free_port()) for port in PORTS}
    on_cpu = not torch.accelerator.is_available()
    specs = []
    for name in ("sender", "receiver"):
        text = (EXAMPLES / f"{name}.yaml").read_text() + (CPU if on_cpu else "")
        for shown, free in ports.items():
            text = text.replace(shown, free)
        port = ports["30000" if name == "sender" else "30001"]
        specs.append(ExampleSpec(name, int(port), text))
    before = Path.cwd()
    os.chdir(ROOT)  # the examples' paths are relative to the repository's root
    try:
        with running(*specs, folder=tmp_path_factory.mktemp("examples"), env=ENV) as (
            sender,
            receiver,
        ):
            yield sender, receiver
    finally:
        os.chdir(before)


def script(name: str, servers: tuple[Server, Server], *command: str) -> list[str]:
    """Run one example from the root, as its reader would; its output's lines."""
    sender, receiver = servers
    by_flag = ["--sender", sender.url, "--receiver", receiver.url]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *(by_flag if name.endswith(".py") else [])],
        cwd=ROOT,
        env={**os.environ, "SENDER": sender.url, "RECEIVER": receiver.url},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(servers) -> None:
    read, reused, full = (json.loads(line) for line in script("curl.sh", servers, "bash"))
    assert read["meta_info"]["prompt_tokens"] == 127
    (provenance,) = reused["meta_info"]["droidspeak"]
    assert provenance["outcome"] == "reused"
    assert provenance["reused_tokens"] == 112
    assert provenance["block"] == [2, 5]
    assert provenance["exact"] is False
    assert reused["text"].strip() == "guard"
    (provenance,) = full["meta_info"]["droidspeak"]
    assert provenance["outcome"] == "off"
    assert full["meta_info"]["cached_tokens"] == 0
    assert full["text"].strip() == "plumber"


def test_openai_client(servers) -> None:
    answered, cached = script("openai_client.py", servers, sys.executable)
    assert answered.endswith("? doctor")
    assert cached == "cached tokens: 96"


def test_frontend_program(servers) -> None:
    planned, concluded, reported = script("frontend_program.py", servers, sys.executable)
    assert planned == "planner: question : what likes bamaz ?"
    assert concluded == "writer: pasta"
    (provenance,) = json.loads(reported)
    assert provenance["outcome"] == "reused"
    # 111 tokens of context; the seventh page ends with the planner's own first word.
    assert provenance["reused_tokens"] == 112
