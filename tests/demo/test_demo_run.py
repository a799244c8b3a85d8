"""The demo as a user runs it: to its end, interrupted, and with servers that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_parts import ENV
from forked import ServerSpec

from sglang_droidspeak.cli import main
from sglang_droidspeak.demo import DemoConfig
from sglang_droidspeak.demo import run as running

pytestmark = pytest.mark.server

SMALL = DemoConfig.small()
OWN_PAIR = [
    item
    for name in ("sender", "receiver", "profile", "data")
    for item in (f"--{name}", str(getattr(SMALL, name)))
]


@contextmanager
def demo(out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a demo. Return it, and the value of an environment variable that all its children
    inherit."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "sglang_droidspeak.cli", "demo", "--out", str(out), *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DROIDSPEAK_TEST_MARK": mark},
        # What a shell runs in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.communicate()


def marked_processes(mark: str) -> list[int]:
    ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environ:
                ids.append(int(entry.name))
    return ids


def assert_nothing_is_left(mark: str) -> None:
    deadline_s = time.monotonic() + 60
    while left := marked_processes(mark):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.1)


def run(*args: str) -> int:
    """Run the command in this process, on servers that are forks of one process that has imported
    SGLang."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "ServerSpec", ServerSpec)
        patched.setattr(DemoConfig, "env", ENV)
        return main(["demo", *args])


def test_own_pair_is_answered_and_timed(tmp_path, capfd):
    status = run("--out", str(tmp_path), *OWN_PAIR, "--num-questions", "9")
    output = "".join(capfd.readouterr())
    assert status == 0, output
    report = json.loads((tmp_path / "demo.json").read_text())
    ways = report["pair"]["conditions"]
    assert report["failures"] == []
    assert report["ceiling"] is None
    assert ways["block"]["quality"] >= 0.95 * ways["full_prefill"]["quality"]
    assert ways["full_reuse"]["quality"] <= ways["full_prefill"]["quality"] - 0.2
    assert ways["block"]["num_reused"] == 9
    assert ways["block"]["layers_recomputed"] <= 6
    assert ways["block"]["tokens_reused"] == ways["full_reuse"]["tokens_reused"] > 100
    assert len(ways["full_prefill"]["ttft_ms"]) == 9
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "full prefill" in output


@pytest.mark.parametrize(
    ("number", "num_servers"), [(signal.SIGTERM, 2), (signal.SIGINT, 2), (signal.SIGINT, 1)]
)
def test_a_signal_ends_the_servers(tmp_path, number, num_servers):
    """The signal may also come while the servers start."""
    with demo(tmp_path) as (process, mark):
        deadline_s = time.monotonic() + 240
        while len(marked_processes(mark)) <= num_servers:
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(number)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 130
        assert "interrupted" in output
        assert_nothing_is_left(mark)


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path, capfd):
    options = tmp_path / "options.yaml"
    options.write_text("no-such-option: 1\n")
    assert run("--out", str(tmp_path / "out"), *OWN_PAIR, "--options", str(options)) == 1
    output = "".join(capfd.readouterr())
    assert "ended with" in output and "no-such-option" in output
