"""Facts about the machine and the code of a measurement: versions, hardware, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
"""Root of the repository, in an editable installation."""

_GROUPS: Final = Path("/sys/fs/cgroup")
_GROUP: Final = Path("/proc/self/cgroup")
_VERSIONS: Final = (
    # start of its line in /proc/self/cgroup, folder of its mount, files of limit and use
    ("0::/", ".", ("memory.max", "memory.current")),
    (":memory:/", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    versions: dict[str, str]
    processor: str
    num_cores: int
    """Number of cores that this process may use."""
    memory_gib: float
    accelerator: str
    """Name of the accelerator; empty if there is none."""
    load_before: float
    """Mean number of runnable processes in the minute before the measurement. Near 0 on an idle
    machine."""
    commit: str
    """Hash of the commit, with `+` if there are uncommitted changes. Empty outside of a git
    checkout."""


def read_environment(packages: Iterable[str]) -> Environment:
    """Read the environment. `packages` are the names of distributions. A package that is not
    installed has no version."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    versions = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Environment(
        versions=versions | {"python": platform.python_version()},
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages * page_bytes / 2**30, 1),
        accelerator=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        load_before=round(os.getloadavg()[0], 2),
        commit=_commit(),
    )


def memory_bytes() -> int:
    """Return the size of the host's memory, in use or not. In a container that may use less, return
    the container's limit."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def free_memory_bytes() -> int:
    """Return the size of the host's free memory. In a container that may use less, return what the
    container may still use."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())])


def slow_dtype(dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yield a warning if a matrix product in `dtype` takes over twice the time of float32. Many
    processors have no instructions for numbers of 16 bits. Only the CPU is measured."""
    if device.type != "cpu" or dtype == torch.float32:
        return
    if _product_s(dtype) > 2 * _product_s(torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield (
            f"{name} takes more than twice the time of float32 on this processor; if your servers "
            "use float32, give --dtype float32"
        )


def _product_s(dtype: torch.dtype) -> float:
    """Return this thread's shortest time of three products."""
    factors, taken_s = torch.ones(2, 512, 512, dtype=dtype), []
    for _ in range(3):
        began_s = time.thread_time()
        torch.matmul(*factors)
        taken_s.append(time.thread_time() - began_s)
    return min(taken_s)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group that contains this process. Cached pages
    of files count as free."""
    for begins, mount, files in _VERSIONS:
        with contextlib.suppress(OSError):
            own = _GROUP.read_text().partition(begins)[2].partition("\n")[0]
            place = _GROUPS / mount / own
            for group in (place, *place.parents):
                # "max" is no number, and the outermost group has no such files.
                with contextlib.suppress(OSError, ValueError):
                    limit, used = (int((group / it).read_text()) for it in files)
                    lines = (group / "memory.stat").read_text().splitlines()
                    stat = dict(it.split() for it in lines)
                    yield limit, used - int(stat["active_file"]) - int(stat["inactive_file"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return ""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return f"{commit}+" if commit and changes else commit


def _git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
