"""Run each part of the GPU benchmark in its own process, and end the process when its time is up.

A part prints its results so far as a line of JSON. The last line counts if the part is ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Found = dict[str, Any]
REHEARSAL = "DROIDSPEAK_GPU_REHEARSAL"
"""Environment variable: if it is set, servers run on CPUs, at small sizes."""
_MERCY_S = 10.0
"""Seconds that a process has to stop its servers after SIGTERM."""


class NotHere(RuntimeError):
    """The part cannot run on this machine: a device or a package is missing."""


@dataclass(frozen=True)
class Part:
    run: Callable[[int], Iterator[Found]]
    """Function that measures with a number of tokens, and yields its results so far."""
    most_s: float


def is_rehearsal() -> bool:
    return REHEARSAL in os.environ


def needs(*packages: str, on_cpus: bool = False) -> None:
    """Raise NotHere if there is no CUDA device, or if one of these packages is missing. During a
    rehearsal, a part that can run `on_cpus` needs no device."""
    if not (torch.cuda.is_available() or (on_cpus and is_rehearsal())):
        raise NotHere("there is no CUDA device")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise NotHere(f"{package} is not installed")


def attempt(part: Part, num_tokens: int, tell: Callable[[Found], None]) -> None:
    """Run a part in this process, and report its results or its error through `tell`."""
    results: Found = {}
    try:
        for results in part.run(num_tokens):
            tell(results)
    except NotHere as exc:
        tell({**results, "not_run": str(exc)})
    except Exception as exc:  # noqa: BLE001  (CUDA's errors, a kernel's compiler, a server's end)
        traceback.print_exc()
        tell({**results, "failed": f"{type(exc).__name__}: {exc}".partition("\n")[0]})


def within(
    command: Sequence[str], most_s: float, report: Callable[[Found], None] = lambda _: None
) -> Found:
    """Run a command for at most `most_s` seconds. Report each line of JSON as soon as it is
    printed, and return the last one."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    reports: list[Found] = []

    def read() -> None:
        for results in lines_of_json(process.stdout):
            reports.append(results)
            report(results)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        process.wait(most_s)
        cut: Found = {} if reports or not process.returncode else {"failed": "see its output above"}
    except subprocess.TimeoutExpired:
        cut = {"cut": f"it was given {most_s:.0f} s"}
    finally:
        end(process)
    reader.join(_MERCY_S)
    return {**(reports[-1] if reports else {}), **cut}


def lines_of_json(lines: Any) -> Iterator[Found]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        else:
            sys.stderr.write(line)


def end(process: subprocess.Popen[Any]) -> None:
    """End the process and everything that it has started in its session. First send SIGTERM, so
    that a test can stop its servers."""
    with contextlib.suppress(ProcessLookupError):  # No process is left.
        for how in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, how)
            until_s = time.monotonic() + _MERCY_S
            while time.monotonic() < until_s:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def run_all(
    parts: Mapping[str, Part],
    run: Callable[[str, float], Found],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Mapping[str, Any]]:
    """Run all parts in order. Each has its own time, plus the time that earlier parts left."""
    results_of: dict[str, Mapping[str, Any]] = {}
    spare_s = 0.0
    for name, part in parts.items():
        most_s, started_s = part.most_s + spare_s, clock()
        results_of[name] = run(name, most_s)
        spare_s = max(0.0, most_s - (clock() - started_s))
    return results_of
