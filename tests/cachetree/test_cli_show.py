"""Output of commands in a terminal of another encoding, and for errors of several lines."""

import io
import subprocess
import sys

import pytest

from cachetree import cli as cache
from sglang_droidspeak import cli as server

SAY = """
from cachetree.cli import complain, escape_output, show
escape_output()
show("base → json …")
complain("droidspeak", "a template\\nof two lines → said")
"""


def test_characters_missing_in_the_encoding_are_escaped_and_an_error_is_one_line():
    env = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, timeout=60)
    assert ran.stdout == b"base \\u2192 json \\u2026\n", ran.stderr
    assert ran.stderr == b"droidspeak: a template of two lines \\u2192 said\n"


@pytest.mark.parametrize("main", [cache.main, server.main])
def test_both_commands_escape_what_they_print(main, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert sys.stdout.errors == "backslashreplace"
