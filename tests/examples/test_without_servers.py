"""Output of the examples when no server runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_droidspeak.fleet.servers import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIRST = "not reached.*start both .*first"
ASKED = {
    "openai_client.py": ("--sender", FIRST),
    "frontend_program.py": ("--sender", FIRST),
    "lora_roles.py": ("--server", "reached"),
    "rl_loop.py": ("--sglang", FIRST),
}
"""Flag that names a server, and words of the line that the example prints, by example."""
RUN = """
import json, os, runpy, sys, tempfile
import profiles.compute.models, sglang  # These take nearly all of an example's time.

ended = {}
for path, *arguments in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as said:
        if not (pid := os.fork()):
            os.dup2(said.fileno(), sys.stderr.fileno())
            sys.path[0], sys.argv = os.path.dirname(path), [path, *arguments]
            runpy.run_path(path, run_name="__main__")
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        ended[os.path.basename(path)] = status, said.read().decode()
print(json.dumps(ended))
"""
"""Program that runs each example in a fork of one process."""


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """Return the exit status and standard error of each example."""
    url = f"http://127.0.0.1:{free_port()}"
    asked = [[str(EXAMPLES / name), flag, url] for name, (flag, _) in ASKED.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    assert done.stderr == "", "imports print nothing"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", ASKED)
def test_an_example_without_its_servers_ends_with_one_line(name, ended):
    status, said = ended[name]
    (line,) = said.splitlines()
    assert status != 0 and re.search(ASKED[name][1], line), line


def test_requests_by_hand_without_servers_end_with_one_line():
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / "curl.sh")],
        env={**os.environ, "SENDER": url, "RECEIVER": url},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode != 0 and "connect" in line
