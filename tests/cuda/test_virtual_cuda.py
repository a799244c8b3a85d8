"""Tests of the virtual device: its results, and the faults that it has to find."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from virtual_cuda import NotCapturable, VirtualCuda

WIDTH = 64


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def pool() -> torch.Tensor:
    return torch.zeros(16, WIDTH, device="cuda")


def stream_after_this() -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def test_it_computes(cuda):
    x = torch.arange(6, dtype=torch.float32).view(2, 3).to("cuda")
    y = (x @ x.T)[slots(1)]
    assert y.device == torch.device("cuda:0")
    assert y.cpu().tolist() == y.tolist() == [[14.0, 50.0]]


def test_tensors_of_two_devices_do_not_mix(cuda):
    with pytest.raises(RuntimeError, match="different devices"):
        torch.cat([torch.zeros(1, 2, device="cuda"), torch.zeros(1, 2)])


def test_a_row_that_two_streams_write_is_a_race_and_its_neighbours_are_not(cuda):
    rows, low, high = pool(), slots(0, 1), slots(2, 3)
    value = torch.ones(2, WIDTH, device="cuda")
    one, other = stream_after_this(), stream_after_this()
    with torch.cuda.stream(one):
        rows[low] = value
    with torch.cuda.stream(other):
        rows[high] = value
    assert not cuda.races
    with torch.cuda.stream(other):
        rows[low] = value
    assert cuda.races


def test_an_event_orders_what_came_before_it(cuda):
    rows, some = pool(), slots(0)
    one, other = stream_after_this(), stream_after_this()
    with torch.cuda.stream(one):
        rows[some] = torch.ones(1, WIDTH, device="cuda")
        done = torch.cuda.Event()
        done.record()
    other.wait_event(done)
    with torch.cuda.stream(other):
        rows[some].sum()
    assert not cuda.races


def test_page_locked_memory_that_is_written_while_it_is_copied_is_a_race(cuda):
    memory = cuda.page_locked(64)
    torch.frombuffer(memory, dtype=torch.uint8).to("cuda", non_blocking=True)
    assert not cuda.stalls
    np.copyto(np.asarray(memory), 1)
    assert cuda.races
    cuda.races.clear()
    torch.cuda.current_stream().synchronize()
    np.copyto(np.asarray(memory), 2)
    assert not cuda.races


def test_what_one_thread_waited_for_another_knows_only_if_it_is_told(cuda):
    memory = cuda.page_locked(64)

    def races_of(tells: bool) -> int:
        cuda.races.clear()
        torch.frombuffer(memory, dtype=torch.uint8).to("cuda", non_blocking=True)
        has_copied, is_over = threading.Semaphore(0), threading.Semaphore(0)

        def write() -> None:
            if tells:
                has_copied.acquire()
            np.copyto(np.asarray(memory), 1)
            is_over.release()

        threading.Thread(target=write).start()
        torch.cuda.current_stream().synchronize()
        has_copied.release()
        is_over.acquire()
        return len(cuda.races)

    assert races_of(tells=False)
    assert not races_of(tells=True)


@pytest.mark.parametrize(
    "operation",
    [
        lambda marks, rows: marks.any().item(),
        lambda marks, rows: marks.nonzero(),
        lambda marks, rows: rows[marks],
        lambda marks, rows: marks.__setitem__(slots(1), True),
        lambda marks, rows: rows[[1, 2]],
        lambda marks, rows: rows.cpu(),
        lambda marks, rows: torch.ones(3).to("cuda", non_blocking=True),
        lambda marks, rows: torch.cuda.current_stream().synchronize(),
    ],
)
def test_what_makes_the_host_wait_is_noted_and_cannot_be_captured(cuda, operation):
    marks, rows = torch.zeros(16, dtype=torch.bool, device="cuda"), pool()
    cuda.stalls.clear()
    operation(marks, rows)
    assert cuda.stalls
    with cuda.capturing(), pytest.raises(NotCapturable):
        operation(marks, rows)


def test_what_does_not_is_captured(cuda):
    marks, rows, some = torch.zeros(16, dtype=torch.bool, device="cuda"), pool(), slots(1, 2)
    cuda.stalls.clear()
    with cuda.capturing():
        marks.index_fill_(0, some, True)
        rows[some] = rows[:2] * 2 + 1
        rows[:3].zero_()
    assert not cuda.stalls
    assert marks.tolist() == [False, True, True] + 13 * [False]


def test_an_event_has_to_be_over_before_its_time_is_asked(cuda):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    stop.record()
    with pytest.raises(RuntimeError, match="over"):
        start.elapsed_time(stop)
    assert stop.query()
    assert start.elapsed_time(stop)


def test_queues_of_the_product_carry_clocks():
    from cachetree import tier
    from cachetree.transport import send_queue

    for module in (tier, send_queue):
        assert module.SimpleQueue is SimpleQueue
        with VirtualCuda():
            assert module.SimpleQueue is not SimpleQueue
        assert module.SimpleQueue is SimpleQueue
