"""Host memory is registered with the device once, and unregistered at the end."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cachetree import ConfigError
from cachetree.memory import Arena, Blocks
from cachetree.memory.arena import address
from sglang_droidspeak.store.rows import page_locked


class Runtime:
    """A stand-in for CUDA's runtime, on a device with a host that allows this many locked bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, at: int, num_bytes: int, flags: int) -> int:
        assert flags == 0 and at % mmap.PAGESIZE == 0
        if sum(self.locked.values()) + num_bytes > self.limit_bytes:
            return 2
        self.locked[at] = num_bytes
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        return 0 if self.locked.pop(at, None) else 713


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime(1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    yield runtime
    assert not runtime.locked, "left page-locked"


def test_all_of_an_arena_is_locked_until_it_is_closed(runtime):
    arena = Arena(1 << 19, page_locked)
    ((at, num_bytes),) = runtime.locked.items()
    loan = arena.take([Blocks(1 << 10, 1 << 9)])
    whole = np.frombuffer(loan.memory, np.uint8)
    assert (at, num_bytes) == (address(whole), whole.nbytes)
    assert num_bytes == arena.file.num_bytes
    arena.close()
    arena.close()


def test_an_arena_that_is_dropped_is_let_go(runtime):
    arena = Arena(1 << 19, page_locked)
    assert runtime.locked
    del arena


def test_what_cannot_be_locked_is_one_line_with_a_remedy(runtime):
    with pytest.raises(
        ConfigError, match=r"cannot be page-locked \(CUDA error 2\); lower host_gb or"
    ) as caught:
        Arena(1 << 20, page_locked)
    assert "\n" not in str(caught.value)


def test_what_stays_locked_is_told(runtime, caplog):
    arena = Arena(1 << 19, page_locked)
    runtime.locked.clear()
    arena.close()
    assert "host memory stays page-locked: CUDA error 713" in caplog.text
