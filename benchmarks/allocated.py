"""Count the bytes that a process has allocated, for benchmarks of memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def counting() -> Iterator[ProcessPoolExecutor]:
    """Start a process in which `allocated_bytes` counts all memory: Python uses malloc there."""
    os.environ["PYTHONMALLOC"] = "malloc"  # Only processes that start later read it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def allocated_bytes() -> int:
    """Bytes that this process holds from glibc's malloc."""

    class Info(ctypes.Structure):
        _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))

    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = Info
    info = libc.mallinfo2()
    mapped, in_use = info.field_4, info.field_7
    return mapped + in_use
