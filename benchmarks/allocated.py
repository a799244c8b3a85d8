"""What a process holds, for benchmarks that count bytes."""

from __future__ import annotations

import ctypes


def allocated_bytes() -> int:
    """What this process holds of glibc's malloc, which is everything under PYTHONMALLOC=malloc."""

    class Info(ctypes.Structure):
        _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))

    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = Info
    info = libc.mallinfo2()
    mapped, in_use = info.field_4, info.field_7
    return mapped + in_use
