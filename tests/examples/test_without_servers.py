"""Output of the examples if no server runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_droidspeak.fleet.servers import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIRST = "not reached.*start both .*first"


@pytest.mark.parametrize(
    ("name", "flag", "said"),
    [
        ("curl.sh", None, "connect"),
        ("openai_client.py", "--sender", FIRST),
        pytest.param("frontend_program.py", "--sender", FIRST, marks=pytest.mark.long),
        ("lora_roles.py", "--server", "reached"),
        ("rl_loop.py", "--sglang", FIRST),
    ],
)
def test_an_example_without_its_servers_ends_with_one_line(
    name: str, flag: str | None, said: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    program = "bash" if name.endswith(".sh") else sys.executable
    done = subprocess.run(
        [program, str(EXAMPLES / name), *((flag, url) if flag else ())],
        env={**os.environ, "SENDER": url, "RECEIVER": url},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode != 0 and re.search(said, line), line
