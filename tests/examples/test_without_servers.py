"""What the examples say if no server runs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_droidspeak.fleet.servers import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_curl_says_that_no_server_is_reached() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    env = {"SENDER": url, "RECEIVER": url, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    ran = subprocess.run(
        [EXAMPLES / "curl.sh"], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode and "connect" in ran.stderr


@pytest.mark.parametrize(
    "name", ["openai_client", pytest.param("frontend_program", marks=pytest.mark.long)]
)
def test_client_says_in_one_line_that_servers_have_to_be_started(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(sys, "argv", [name, "--sender", url, "--receiver", url])
    with pytest.raises(SystemExit, match=r"not reached.*start both .*first"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
