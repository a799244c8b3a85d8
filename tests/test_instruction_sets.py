"""Numbers are right with any instruction set of the CPU, and with any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "profiles"
TESTS = [FOLDER / name for name in ("test_mixtures.py", "test_oracle.py")]
SOME = "llama or padding or blend"
SETS = {
    "default": {"DNNL_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"DNNL_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}
"""The best instruction sets that torch may use, by its own names, and the same for oneDNN and
MKL."""
RUN = """
import sys, pytest, torch
assert torch.backends.cpu.get_cpu_capability().lower() == sys.argv[1]
sys.exit(pytest.main(sys.argv[2:]))
"""


def sets_of_this_cpu() -> list[str]:
    most = torch.backends.cpu.get_cpu_capability().lower()
    known = list(SETS)
    return known[: known.index(most) + 1] if most in SETS else known[:1]


@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("instructions", sets_of_this_cpu())
def test_the_numeric_tests_pass_with(instructions, num_threads):
    env = {
        **os.environ,
        **SETS[instructions],
        "ATEN_CPU_CAPABILITY": instructions,
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-c", RUN, instructions, "-q", "-k", SOME, "--noconftest"]
    command += map(str, TESTS)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
