"""The examples, run by hand as the pages show: curl, the OpenAI client, frontend programs."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from engine_parts import ENV
from shipped import prompt_of
from test_documented_code import commands, of

from profiles.data.records import read_records
from sglang_droidspeak.cli import main
from sglang_droidspeak.fleet.client import ask_server
from sglang_droidspeak.fleet.servers import Server, end_of, free_port, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/lora.md").read_text()
QUICK_START = (ROOT / "docs/quickstart.md").read_text()
PORTS = ("30000", "30001", "30010")
CPU = "\ndevice: cpu\nsleep-on-idle: true\n"
"""Lines that the quick start says to add without an accelerator."""

LOGS: list[Path] = []
"""Logs of the running servers, shown if an example fails."""

pytestmark = pytest.mark.server


@dataclass(frozen=True, kw_only=True)
class ExampleSpec(forked.ServerSpec):
    """A server started from an example's own YAML, with other ports."""

    text: str
    model: Path = Path()
    """Path of the model, which the example's text names."""

    def words(self, folder: Path) -> Sequence[str]:
        words = super().words(folder)
        (folder / f"{self.name}.yaml").write_text(self.text)
        return words


def started(tmp_path_factory, *specs: ExampleSpec) -> Iterator[list[Server]]:
    """Start servers in the root of the repository, because the examples' paths are relative to
    it."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with running(*specs, folder=tmp_path_factory.mktemp("examples"), env=ENV) as servers:
            LOGS[:] = [it.log for it in servers]
            yield servers
    finally:
        os.chdir(before)


def example_yaml(name: str, ports: Mapping[str, str]) -> str:
    on_cpu = not torch.accelerator.is_available()
    text = (EXAMPLES / f"{name}.yaml").read_text() + (CPU if on_cpu else "")
    for shown, free in ports.items():
        text = text.replace(shown, free)
    return text


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    ports = {port: str(free_port()) for port in PORTS}
    specs = [
        ExampleSpec(name=name, port=int(ports[port]), text=example_yaml(name, ports))
        for name, port in (("sender", "30000"), ("receiver", "30001"))
    ]
    yield from started(tmp_path_factory, *specs)


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory) -> Iterator[list[Server]]:
    """Start a server with the adapters that the page's command names."""
    (command,) = re.findall(r"--enable-lora --lora-paths ([^`]+)```", PAGE)
    adapters = {name: Path(path) for name, path in re.findall(r"(\w+)=(\S+)", command)}
    port = str(free_port())
    text = example_yaml("lora", {"30000": port})
    spec = ExampleSpec(name="lora", port=int(port), text=text, adapters=adapters)
    yield from started(tmp_path_factory, spec)


def script(name: str, *flags: str, **variables: str) -> list[str]:
    """Run one example in the root, as its reader would. Return the lines of its output."""
    interpreter = sys.executable if name.endswith(".py") else "bash"
    # One that hangs says where: Python's fault handler prints all threads' stacks.
    in_time = ["timeout", "--signal=ABRT", "--kill-after=10", "180"]
    done = subprocess.run(
        [*in_time, interpreter, str(EXAMPLES / name), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *map(end_of, LOGS)])
    return [line for line in done.stdout.splitlines() if line]


def flags(servers: Sequence[Server]) -> list[str]:
    sender, receiver = servers
    return ["--sender", sender.url, "--receiver", receiver.url]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(servers):
    sender, receiver = servers
    lines = script("curl.sh", SENDER=sender.url, RECEIVER=receiver.url)
    read, reused, full = (json.loads(line) for line in lines)
    assert read["meta_info"]["prompt_tokens"] == 127
    (provenance,) = reused["meta_info"]["droidspeak"]
    assert provenance["outcome"] == "reused"
    assert provenance["reused_tokens"] == 112
    assert provenance["block"] == [2, 5]
    assert provenance["exact"] is False
    assert reused["text"].strip() == "guard"
    (shown,) = re.findall(r'"meta_info": {(.*?), \.\.\.}\]', QUICK_START, re.DOTALL)
    seen = json.dumps({**reused["meta_info"], **provenance})
    for pair in re.findall(r'"\w+": (?:"\w+"|\w+|\[\d[^]]*\])', shown):
        assert pair in seen
    (provenance,) = full["meta_info"]["droidspeak"]
    assert provenance["outcome"] == "off"
    assert full["meta_info"]["cached_tokens"] == 0
    assert full["text"].strip() == "plumber"


def test_explain(servers, tmp_path, capsys):
    """`explain` shows the plan of a prompt, and the outcome of a request."""
    sender, receiver = servers
    prompt = prompt_of(read_records(EXAMPLES / "pairs/data/held_out.jsonl")[-1])
    (tmp_path / "prompt.txt").write_text(prompt)

    def explain(*what: str) -> dict[str, Any]:
        assert main(["explain", *what, "--url", receiver.url, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    unsent = ["--text", str(tmp_path / "prompt.txt")]
    assert explain(*unsent)["outcome"] == "no_match"
    sender.generate(prompt, max_new_tokens=1, droidspeak={"publish": "before_reply"})
    foreseen = explain(*unsent)
    (holding,) = foreseen["holdings"]
    assert holding["e_pages"]["2"] == holding["num_pages"] >= 5
    # Of so small a model a full prefill may be sooner; the block is asked for by name below.
    assert foreseen["outcome"] in ("reused", "slower")
    assert foreseen["measured"] is None
    assert [2, 5] in [it.get("block") for it in foreseen["ways"]]
    reply = receiver.generate(prompt, max_new_tokens=1, droidspeak={"block": "2:5"})
    explained = explain(reply["meta_info"]["id"])
    assert [explained["measured"]] == reply["meta_info"]["droidspeak"]
    assert explained["outcome"] == "reused"
    assert [it["reason"] for it in explained["ways"] if it.get("block") == [2, 5]] == ["taken"]
    assert explained["prompt_tokens"] == reply["meta_info"]["prompt_tokens"]
    salted = explain(*unsent, "--cache-salt", "somebody")
    assert (salted["outcome"], salted["holdings"]) == ("no_match", [])


def test_documented_requests_work_on_servers(servers, tmp_path, monkeypatch, capsys):
    """Commands run as the page shows them, with other ports and another request's id."""
    sender, receiver = servers
    reply = sender.generate("a prompt", max_new_tokens=1)
    stand_ins = {
        "http://127.0.0.1:30000": sender.url,
        "http://127.0.0.1:30001": receiver.url,
        "REQUEST_ID": reply["meta_info"]["id"],
    }
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "prompt.txt").write_text("a prompt")
    monkeypatch.chdir(tmp_path)
    ran = []
    for words in itertools.chain.from_iterable(map(commands, of("bash"))):
        line = "\n".join(words)
        for shown, real in stand_ins.items():
            line = line.replace(shown, real)
        match line.split("\n"):
            case ["droidspeak", "explain" | "peers" as ran_one, *rest]:
                assert main([ran_one, *rest]) == 0
            case ["droidspeak", "doctor" as ran_one, *rest]:
                main([ran_one, *rest])
            case _:
                continue
        ran.append(ran_one)
    assert sorted(ran) == ["doctor"] * 5 + ["explain"] * 2 + ["peers"]
    # The page's port is not this sender's; whether the links are fast enough for so small a model,
    # nobody knows.
    wrong = re.findall(r"(?m)^WRONG (.*)", capsys.readouterr().out)
    assert [it for it in wrong if not it.startswith(("link ", "peer tcp://127.0.0.1:30010"))] == []


def test_verify_finds_nothing_wrong(servers, capsys):
    """Whether reuse is faster is measured in `benchmarks`: the models here are small."""
    urls = [it.url for it in servers]
    data = str(EXAMPLES / "pairs/data/held_out.jsonl")
    main(["verify", *urls, "--num", "3", "--data", data, "--template", "<bos> {context} {input}"])
    lines = capsys.readouterr().out.splitlines()
    wrong = [it for it in lines if it.startswith("WRONG")]
    assert [it for it in wrong if not re.match("WRONG (link|first token)", it)] == []
    for name in ("reuse: 3 reused", "distance: 0.0", "receiver: cancel", "another tenant: 0"):
        assert any(it.startswith(f"ok    {name}") for it in lines), lines


def test_openai_client(servers):
    answered, cached = script("openai_client.py", *flags(servers))
    assert answered.endswith("? doctor")
    assert cached == "cached tokens: 96"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_answers_say_their_outcome_in_headers(servers, is_streamed):
    _, receiver = servers
    body = {"model": "x", "prompt": "A guard", "max_tokens": 2, "stream": is_streamed}
    source = {"x-vsr-kv-source-pod": "any"}
    reply = ask_server("POST", f"{receiver.url}/v1/completions", json=body, headers=source)
    assert reply.headers["x-droidspeak-outcome"] in ("no_match", "too_short")
    assert reply.headers["x-droidspeak-exact"] == "true"
    assert reply.headers["x-vsr-kv-transfer-status"] == "fallback_reprefill"


def test_frontend_program(servers):
    planned, concluded, reported = script("frontend_program.py", *flags(servers))
    assert planned == "planner: question : what likes bamaz ?"
    assert concluded == "writer: pasta"
    (provenance,) = json.loads(reported)
    assert provenance["outcome"] == "reused"
    # 111 tokens of context; the seventh page ends with the planner's own first word.
    assert provenance["reused_tokens"] == 112


def test_roles_read_one_another(lora_server):
    """The output is that of the page, except for times."""
    (server,) = lora_server
    (shown,) = re.findall(r"lora_roles\.py\n```\n\n```text\n([^`]+)```", PAGE)
    lines = script("lora_roles.py", "--server", server.url)
    assert without_times(lines) == without_times(shown.splitlines())
    assert any(line.endswith(" reused") for line in lines)


def without_times(lines: Sequence[str]) -> list[str]:
    return [re.sub(r" +\d+ ms", "", line) for line in lines]
