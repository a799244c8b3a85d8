"""Start SGLang's processes as forks, so that the server imports SGLang once and not three times.

Importing SGLang is nearly all of a small server's start. SGLang spawns fresh interpreters because
a process that has touched CUDA cannot be forked; here there is none. Off by default: a fork copies
only the thread that calls it, so it is right only while the launcher has started none that hold
locks, which is so for `launch_server`, and not for an `Engine` inside somebody's program.

OpenMP's threads do not outlive a fork either, and a child waits for them for ever. So the launcher
computes on one thread, and its children on as many as they were given.
"""

import gc
import multiprocessing
import os

import torch
from sglang.srt.plugins.hook_registry import HookType

START_METHOD = "SGLANG_TORCH_CPU_START"  # environment variable: spawn (default) or fork


def hooks() -> dict:
    """Where they were asked for; ValueError for an unknown method."""
    method = os.environ.get(START_METHOD, "spawn")
    if method not in ("spawn", "fork"):
        raise ValueError(f"{START_METHOD} is {method!r}; use 'spawn' or 'fork'")
    if method == "fork":
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(num_threads))
    forking = {"sglang.srt.entrypoints.engine._set_envs_and_config": (_fork, HookType.AFTER)}
    return forking if method == "fork" else {}


def _fork(result: None, server_args: object) -> None:
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # What is imported is never garbage, and a fork that looks at it copies it.
