"""The fleet of `examples/mooncake.yaml`, with a real Mooncake master: models read each other's
pages, and processes are killed."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import requests
from engine_parts import CPU, PAGE, SLOW_DEVICE, Answer, answer, eventually, oracle, whole_pages
from forked import ServerSpec
from shipped import by_context, context_prompt

from benchmarks.oracle import Generated
from cachetree.ids import EMPTY_SPAN, Span
from profiles.data.records import read_records
from sglang_droidspeak.fleet.fleet import read_fleet, specs
from sglang_droidspeak.fleet.servers import Process, ProgramSpec, Server, free_port, running

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "examples" / "pairs"
WEIGHTS = PAIRS / "weights"
BLOCK, LAYERS = Span(2, 5), 12
TEXTS = [context_prompt(it) for it, _ in by_context(read_records(PAIRS / "data/held_out.jsonl"))]
MAX_NEW = 6
LIMIT_S = 8.0
"""Limit of one request on a busy machine while the store fails: its calls may take 5 s."""


@dataclass
class Cluster:
    folder: Path
    master: Process
    reader: Server
    answerer: Server
    metrics_port: int

    def num_objects(self) -> int:
        """Return the number of objects in the store; 0 if its master is gone."""
        with contextlib.suppress(requests.ConnectionError):
            text = requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text
            count = re.search(r"^master_key_count (\d+)", text, re.MULTILINE)
            return int(count[1]) if count else 0
        return 0

    def read(self, text: str, *, wait_s: float = 10.0) -> list[int]:
        """Return a text's tokens, once the reader has read and stored it. Each object has two
        halves, which may take longer to store."""
        (tokens,) = self.reader.post("/tokenize", prompt=[text])["tokens"]
        least = self.num_objects() + 2 * (len(tokens) // PAGE) * (LAYERS + 1)
        self.reader.generate(tokens, max_new_tokens=1)
        until_s = time.monotonic() + wait_s
        while self.num_objects() < least and time.monotonic() < until_s:
            time.sleep(0.05)
        return tokens

    def ask(self, tokens: list[int]) -> Answer:
        """Ask, and check that the answer is right and within the limit."""
        self.answerer.flush()
        begun_s = time.monotonic()
        reply = answer(self.answerer, tokens, max_new_tokens=MAX_NEW)
        assert time.monotonic() - begun_s < LIMIT_S
        check(reply, tokens)
        return reply


def check(reply: Answer, tokens: list[int]) -> None:
    """Check that the reply equals the oracle's, for the number of tokens that it says it reused."""
    is_reused = reply.provenance["outcome"] == "reused"
    assert not is_reused or reply.provenance["block"] == [BLOCK.start, BLOCK.stop]
    reply.assert_equals(expected(tokens, BLOCK if is_reused else EMPTY_SPAN))


def expected(tokens: list[int], block: Span) -> Generated:
    receiver = WEIGHTS / "receiver"
    sender = WEIGHTS / "sender" if len(block) else receiver
    reused = whole_pages(len(tokens))
    return oracle(receiver, sender, tokens, block=block, num_reused=reused, max_new=MAX_NEW)


def example(folder: Path) -> tuple[Path, dict[str, int]]:
    """Return the example's file at free ports, and these ports by the ports in the file."""
    pytest.importorskip(
        "mooncake.store",
        reason="needs the wheel mooncake-transfer-engine, or its -non-cuda, and libibverbs",
        exc_type=ImportError,
    )
    ports = {it: free_port() for it in ("30000", "30001", "30050", "30051")}
    text = (ROOT / "examples" / "mooncake.yaml").read_text()
    file = folder / "fleet.yaml"
    file.write_text(re.sub(r"\b300[05][01]\b", lambda it: str(ports[it[0]]), text))
    return file, ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("mooncake")
    file, ports = example(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).chdir(ROOT)
        wanted = [
            it
            if isinstance(it, ProgramSpec)
            else ServerSpec(**{of.name: getattr(it, of.name) for of in fields(it)})
            for it in specs(read_fleet(file), CPU)
        ]
        started = running(*wanted, folder=folder / "logs", env=SLOW_DEVICE)
        machines = Cluster(folder, *stack.enter_context(started), ports["30051"])
        stack.callback(lambda: machines.master.stop())
        yield machines


def reused_from(cluster: Cluster, texts: Iterator[str]) -> list[int]:
    """Return the tokens of a text that the answerer has reused. Each try takes a new text, because
    pages that were late are not asked for again for some seconds."""
    for text in texts:
        tokens = cluster.read(text)
        if (reply := cluster.ask(tokens)).provenance["outcome"] == "reused":
            assert reply.provenance["location"] == "hicache"
            assert reply.provenance["reused_tokens"] == whole_pages(len(tokens))
            return tokens
    raise AssertionError("nothing is reused")


def test_what_is_killed_harms_no_answer(cluster):
    """Two processes are killed, one after the other: the master, which forgets everything, and the
    engine that keeps the pages."""
    texts = iter(TEXTS)
    known = reused_from(cluster, texts)

    def ask_while_dying(kill: Callable[[], None]) -> None:
        prompts = [known, *(cluster.read(next(texts)) for _ in range(2))]
        cluster.answerer.flush()
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = [
                pool.submit(answer, cluster.answerer, it, max_new_tokens=MAX_NEW, timeout_s=LIMIT_S)
                for it in prompts
            ]
            kill()
            for tokens, reply in zip(prompts, replies, strict=True):
                check(reply.result(), tokens)
        cluster.ask(known)

    ask_while_dying(cluster.master.kill)
    for _ in range(3):
        cluster.ask(cluster.read(next(texts), wait_s=0))
    cluster.master = cluster.master.spec.start(cluster.folder / "logs", {})
    eventually(cluster.master.is_ready)
    known = reused_from(cluster, texts)

    ask_while_dying(cluster.reader.kill)
    for _ in range(5):
        cluster.ask(known)
        time.sleep(1)


def test_one_command_starts_all_of_it(tmp_path):
    """One command starts the example; one engine reads KV of the other; Ctrl-C ends everything."""
    file, ports = example(tmp_path)
    command = [sys.executable, "-m", "sglang_droidspeak.cli", "up", str(file)]
    command += ["--device", "cpu", "--out", str(tmp_path / "out")]

    def ask(port: str, text: str) -> dict[str, Any]:
        body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        reply = requests.post(f"http://127.0.0.1:{ports[port]}/generate", json=body, timeout=60)
        (provenance,) = reply.json()["meta_info"]["droidspeak"]
        return dict(provenance)

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            said = [
                line.split()[0] for line in iter(up.stdout.readline, "ready; Ctrl-C ends them\n")
            ]
            assert said[1:] == ["master", "reader", "answerer"]
            for text in TEXTS[:6]:
                ask("30000", text)
                time.sleep(2)  # Written behind.
                provenance = ask("30001", text)
                if provenance["outcome"] == "reused":
                    break
            assert (provenance["outcome"], provenance["location"]) == ("reused", "hicache"), (
                provenance
            )
            assert provenance["block"] == [BLOCK.start, BLOCK.stop]
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(30)
    for port in ports.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
