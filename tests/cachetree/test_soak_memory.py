"""Cases that the memory soak must report as growth, and cases that it must not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import Resident, resident
from soak_memory import LIMIT_PER_HOUR, growth_per_hour

MIB = 1 << 20
HALF_AN_HOUR = range(360, 1800, 5)
"""Seconds after the warm-up."""

CHILD = """
import mmap, os, sys
print("begins", flush=True)
sys.stdin.readline()
size = 64 << 20
if sys.argv[1] == "own":
    kept = bytearray(b"1") * size
else:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, size)
    kept = mmap.mmap(fd, size)
    for at in range(0, size, mmap.PAGESIZE):
        kept[at] = 1
print("has it", flush=True)
sys.stdin.readline()
"""


@contextmanager
def child(kind: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.communicate()


@pytest.mark.parametrize(("kind", "grows"), [("own", (64, 0)), ("mapped", (0, 64))])
def test_own_memory_is_told_from_mapped(kind, grows):
    with child(kind) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        before = resident(process.pid)
        process.stdin.write("now\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has it\n"
        after = resident(process.pid)
    grown = [(now - then) / MIB for now, then in zip(after, before, strict=True)]
    assert grown == pytest.approx(grows, abs=4)


def samples(own_mib_per_hour: float, mapped_mib_per_hour: float) -> list[tuple[float, Resident]]:
    """Return samples of the memory of a process. It has 36 MiB of its own, later 8 MiB more in
    every other sample, and 550 MiB that are mapped."""
    return [
        (
            float(at_s),
            Resident(
                int(MIB * (36 + 8 * (index % 2) * (at_s > 1080) + own_mib_per_hour * at_s / 3600)),
                int(MIB * (550 + mapped_mib_per_hour * at_s / 3600)),
            ),
        )
        for index, at_s in enumerate(HALF_AN_HOUR)
    ]


def test_growing_mapped_memory_and_fluctuating_own_memory_pass():
    growth = growth_per_hour(samples(own_mib_per_hour=0, mapped_mib_per_hour=50))
    assert growth["mapped"] == pytest.approx(50 / 600, rel=0.05)
    assert abs(growth["own"]) < LIMIT_PER_HOUR / 100


@pytest.mark.parametrize(("own_mib_per_hour", "is_too_much"), [(5.0, False), (7.0, True)])
def test_own_memory_may_grow_by_a_hundredth_of_all_that_is_resident(own_mib_per_hour, is_too_much):
    growth = growth_per_hour(samples(own_mib_per_hour, mapped_mib_per_hour=0))
    assert growth["own"] == pytest.approx(own_mib_per_hour / 590, rel=0.1)
    assert (growth["own"] >= LIMIT_PER_HOUR) is is_too_much
