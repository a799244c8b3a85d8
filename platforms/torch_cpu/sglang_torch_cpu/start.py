"""Start SGLang's processes as forks, so that the server imports SGLang once and not three times.

Importing SGLang takes nearly all of a small server's start. SGLang spawns fresh interpreters,
because a process that has touched CUDA cannot be forked; this platform has no CUDA. Forks are off
by default: a fork copies only the calling thread, so no other thread may hold a lock then. In
`launch_server` no thread does. In a program with an `Engine`, another thread may.

A fork has no OpenMP threads either, and would wait for them for ever. So the launcher computes on
one thread, and its children on the configured number.
"""

import gc
import multiprocessing
import os

import torch
from sglang.srt.plugins.hook_registry import HookType

START_METHOD = "SGLANG_TORCH_CPU_START"  # environment variable: spawn (default) or fork


def hooks() -> dict:
    """Return the hooks for the start method that $SGLANG_TORCH_CPU_START names: `spawn` or `fork`.
    Raises ValueError for another method. For `fork`, this process then computes on one thread."""
    method = os.environ.get(START_METHOD, "spawn")
    if method not in ("spawn", "fork"):
        raise ValueError(f"{START_METHOD} is {method!r}; use 'spawn' or 'fork'")
    if method == "spawn":
        return {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(num_threads))
    return {"sglang.srt.entrypoints.engine._set_envs_and_config": (_fork, HookType.AFTER)}


def _fork(result: None, server_args: object) -> None:
    multiprocessing.set_start_method("fork", force=True)
    # Imported objects are never garbage; without this, a collection in a fork would copy them.
    gc.freeze()
