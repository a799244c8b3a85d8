"""What a process holds, for benchmarks that count bytes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def counting() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, of whose allocations `allocated_bytes` knows every one."""
    os.environ["PYTHONMALLOC"] = "malloc"  # Of processes that start from now on.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def allocated_bytes() -> int:
    """What this process holds of glibc's malloc."""

    class Info(ctypes.Structure):
        _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))

    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = Info
    info = libc.mallinfo2()
    mapped, in_use = info.field_4, info.field_7
    return mapped + in_use
