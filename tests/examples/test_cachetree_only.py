"""The cache works without SGLang: its example runs and imports neither SGLang nor torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/cachetree_only.py"
RUN = f"""
import runpy, sys
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
print(sorted({{"sglang", "torch", "transformers", "yaml"}} & sys.modules.keys()))
"""


def test_the_example_runs_without_sglang():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["4 pages of my model: 32768 bytes, as stored", "[]"]
