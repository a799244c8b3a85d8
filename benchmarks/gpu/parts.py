"""The parts of a run, each in a process of its own that is ended when its time is up.

A part tells what it has found so far in a line of JSON; of one that was cut the last line counts.
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
_MERCY_S = 10.0
"""For servers to be stopped."""


class NotHere(RuntimeError):
    """This machine lacks what the part runs on."""


@dataclass(frozen=True)
class Part:
    run: Callable[[int], Iterator[Found]]
    """Of so many tokens; yields what it has found so far."""
    most_s: float


def needs(*packages: str) -> None:
    """Raises NotHere without a CUDA device, or one of these packages."""
    if not torch.cuda.is_available():
        raise NotHere("there is no CUDA device")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise NotHere(f"{package} is not installed")


def attempt(part: Part, num_tokens: int, tell: Callable[[Found], None]) -> None:
    """In the part's own process."""
    found: Found = {}
    try:
        for found in part.run(num_tokens):
            tell(found)
    except NotHere as exc:
        tell({**found, "not_run": str(exc)})
    except Exception as exc:  # noqa: BLE001  (CUDA's errors, a kernel's compiler, a server's end)
        traceback.print_exc()
        tell({**found, "failed": f"{type(exc).__name__}: {exc}".partition("\n")[0]})


def within(command: Sequence[str], most_s: float) -> Found:
    """What the part that this command runs has told by its end, or by the end of its time."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    told: list[Found] = []
    reader = threading.Thread(target=lambda: told.extend(lines_of_json(process.stdout)))
    reader.start()
    try:
        process.wait(most_s)
        cut: Found = {} if told or not process.returncode else {"failed": "see its output above"}
    except subprocess.TimeoutExpired:
        cut = {"cut": f"it was given {most_s:.0f} s"}
    finally:
        end(process)
    reader.join(_MERCY_S)
    return {**(told[-1] if told else {}), **cut}


def lines_of_json(lines: Any) -> Iterator[Found]:
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if isinstance(told, dict):
            yield told
        else:
            sys.stderr.write(line)


def end(process: subprocess.Popen[Any]) -> None:
    """It, and what it has started in its session; tests have servers to stop before they end."""
    with contextlib.suppress(ProcessLookupError):  # None is left.
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
    spare_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Mapping[str, Any]]:
    """Each has its own time, and what those before it left."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, part in parts.items():
        most_s, started_s = part.most_s + spare_s, clock()
        found[name] = run(name, most_s)
        spare_s = max(0.0, most_s - (clock() - started_s))
    return found
