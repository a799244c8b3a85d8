"""Forked processes compute on threads of their own."""

import os
import subprocess
import sys

FORKED = """
import multiprocessing
import torch
from sglang_torch_cpu.start import hooks

def compute():
    torch.einsum("i,j->ij", torch.ones(4096), torch.ones(4096))
    assert torch.get_num_threads() == 2

hooks()
torch.ones(1 << 20).exp()
child = multiprocessing.get_context("fork").Process(target=compute, daemon=True)
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
"""


def test_a_fork_computes_on_two_threads_after_its_launcher_has_computed() -> None:
    env = os.environ | {"SGLANG_TORCH_CPU_START": "fork", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
