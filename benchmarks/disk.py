"""How much of the speed of plain files does the disk store keep?

    python benchmarks/disk.py [--mib 256] [--repetitions 7] [--path DIRECTORY]

Physics: a buffered write copies each byte into the page cache, a warm read copies it out, and a
cold read waits for the device. The store adds one checksum per 256 KiB (while the chunk is in the
second-level cache), a header per entry, and one `open` per step. The baseline writes
the same buffers with `pwritev` to a new file, and reads them with `preadv` into the same memory,
1 MiB at a time, without checksums. "synced" ends with an fdatasync on both sides. Cold is after
fdatasync and posix_fadvise(DONTNEED); under a hypervisor its cache may still be warm. Restart is
the opening of a cache whose directory has many small entries, until all of them match.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import result
import xxhash

from cachetree import Cache, CacheConfig, Family, Kind, ModelId, PageHash, Step
from cachetree.disk import DiskConfig, DiskStore

MODEL = ModelId("sender")
FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=2048,
    num_kv_heads=8,
    head_dim=128,
    rope="{}",
    tokenizer="t",
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
STEPS = (*(Step(Kind.KV, layer) for layer in range(FAMILY.num_layers)), Step(Kind.E, 3))
RAW_CHUNK_BYTES = 1 << 20
SMALL = msgspec.structs.replace(FAMILY, page_size=1)
NUM_SMALL = 2000


class Files:
    """The same bytes in memory, in a plain file and in a store; both files are new each time."""

    def __init__(self, directory: Path, num_pages: int) -> None:
        self.directory = directory
        self.pages = [PageHash(number.to_bytes(16, "big")) for number in range(num_pages)]
        sizes = {step: num_pages * FAMILY.page_bytes(step.kind) for step in STEPS}
        random = np.random.default_rng(0)
        words = {step: random.integers(0, 1 << 63, size // 8) for step, size in sizes.items()}
        self.written = {step: memoryview(array).cast("B") for step, array in words.items()}
        self.num_bytes = sum(sizes.values())
        self.read_memory = memoryview(bytearray(self.num_bytes))
        self.raw = directory / "raw"
        self.store = self._open(False)

    def write_raw(self, is_synced: bool) -> None:
        self.raw.unlink(missing_ok=True)
        with self.raw.open("wb", buffering=0) as file:
            offset = 0
            for view in self.written.values():
                for at in range(0, view.nbytes, RAW_CHUNK_BYTES):
                    part = view[at : at + RAW_CHUNK_BYTES]
                    offset += os.pwritev(file.fileno(), [part], offset)
            if is_synced:
                os.fdatasync(file.fileno())

    def write_store(self, is_synced: bool) -> None:
        if not self.store.write(MODEL, None, self.pages, [3], lambda step: [self.written[step]]):
            raise SystemExit("the store did not take the entry")

    def renew_store(self, is_synced: bool) -> None:
        """Not timed."""
        self.store.close()
        shutil.rmtree(self.directory / "store")
        self.store = self._open(is_synced)

    def read_raw(self) -> None:
        with self.raw.open("rb", buffering=0) as file:
            for at in range(0, self.num_bytes, RAW_CHUNK_BYTES):
                os.preadv(file.fileno(), [self.read_memory[at : at + RAW_CHUNK_BYTES]], at)

    def read_store(self) -> None:
        offset = 0
        found = self.store.index.find(MODEL, self.pages)
        for step in STEPS:
            for entry, span in found:
                size = len(span) * self.written[step].nbytes // len(self.pages)
                self.store.read(entry, step, span, self.read_memory[offset : offset + size])
                offset += size

    def make_cold(self) -> None:
        for path in (self.raw, *(self.directory / "store").glob("entry-*")):
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.read_memory)

    def _open(self, is_synced: bool) -> DiskStore:
        path = self.directory / "store"
        config = DiskConfig(path=str(path), num_bytes=16 * self.num_bytes, sync=is_synced)
        return DiskStore(FAMILY, config)


@dataclass(frozen=True)
class Run:
    gb_per_s: float
    cpu_s_per_gb: float
    """Of the calling thread; hardly disturbed by what else runs."""


def timed(files: Files, run: Callable[[], None]) -> Run:
    begun_at_s, begun_cpu_s = time.perf_counter(), time.thread_time()
    run()
    cpu_s, wall_s = time.thread_time() - begun_cpu_s, time.perf_counter() - begun_at_s
    return Run(files.num_bytes / wall_s / 1e9, cpu_s / files.num_bytes * 1e9)


def compare(files: Files) -> None:
    files.write_raw(False)
    files.write_store(False)
    digests = []
    for read in (files.read_raw, files.read_store):
        files.read_memory[:] = bytes(files.num_bytes)
        read()
        digests.append(files.digest())
    state = xxhash.xxh3_128()
    for view in files.written.values():
        state.update(view)
    assert {*digests} == {state.hexdigest()}, f"not the bytes that were written: {digests}"


def measure(files: Files, repetitions: int) -> dict[str, dict[str, list[Run]]]:
    """Per question and contender; the contenders take turns in going first."""
    runs: dict[str, dict[str, list[Run]]] = {}
    readers = {"plain file": files.read_raw, "store": files.read_store}
    for number in range(repetitions):
        order = ("plain file", "store") if number % 2 else ("store", "plain file")
        for is_synced in (True, False):
            files.renew_store(is_synced)
            writers = {
                "plain file": partial(files.write_raw, is_synced),
                "store": partial(files.write_store, is_synced),
            }
            question = "write, synced" if is_synced else "write"
            for name in order:
                of_question = runs.setdefault(question, {"plain file": [], "store": []})
                of_question[name].append(timed(files, writers[name]))
        for question in ("read, warm", "read, cold"):
            for name in order:
                if question == "read, cold":
                    files.make_cold()
                of_question = runs.setdefault(question, {"plain file": [], "store": []})
                of_question[name].append(timed(files, readers[name]))
    return runs


def measure_restarts(directory: Path, repetitions: int) -> list[float]:
    """Seconds per opening of a cache with `NUM_SMALL` entries of a page each."""
    kv, e = (memoryview(bytes(SMALL.page_bytes(kind))) for kind in (Kind.KV, Kind.E))
    config = DiskConfig(path=str(directory / "restart"), num_bytes=1 << 30)
    with DiskStore(SMALL, config) as store:
        for number in range(NUM_SMALL):
            page = PageHash(number.to_bytes(16, "big"))
            store.write(MODEL, None, [page], [3], lambda step: [kv if step.kind is Kind.KV else e])
    cache = CacheConfig(
        disk_path=config.path, disk_bytes=config.num_bytes, host_bytes=0, serves=False
    )
    seconds = []
    for _ in range(repetitions):
        begun_at_s = time.perf_counter()
        with Cache(SMALL, cache) as opened:
            seconds.append(time.perf_counter() - begun_at_s)
            assert len(opened.match([PageHash((NUM_SMALL - 1).to_bytes(16, "big"))])) == 1
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the entry")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--path", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=None, help="file to append the result to")
    args = parser.parse_args()
    environment = result.here()
    page_bytes = FAMILY.num_layers * FAMILY.kv_page_bytes + FAMILY.e_page_bytes
    with tempfile.TemporaryDirectory(dir=args.path) as directory:
        files = Files(Path(directory), max(1, (args.mib << 20) // page_bytes))
        compare(files)
        runs = measure(files, args.repetitions)
        files.store.close()
        restarts = measure_restarts(Path(directory), args.repetitions)
    print(f"{'GB/s, median (min to max)':26} {'plain file':>22} {'store':>22}  of plain  CPU s/GB")
    found: dict[str, object] = {"mib": args.mib}
    for question, by_contender in runs.items():
        cells, cpu = [], []
        for values in by_contender.values():
            speeds = [it.gb_per_s for it in values]
            cells.append(
                f"{statistics.median(speeds):5.2f} ({min(speeds):5.2f} to {max(speeds):5.2f})"
            )
            cpu.append(statistics.median(it.cpu_s_per_gb for it in values))
        pairs = zip(by_contender["store"], by_contender["plain file"], strict=True)
        ratio = statistics.median(ours.gb_per_s / plain.gb_per_s for ours, plain in pairs)
        print(
            f"{question:26} {cells[0]:>22} {cells[1]:>22}  {ratio:8.2f}  {cpu[0]:.2f} {cpu[1]:.2f}"
        )
        found[question] = {
            "gb_per_s": {
                name: statistics.median(it.gb_per_s for it in values)
                for name, values in by_contender.items()
            },
            "cpu_s_per_gb": dict(zip(by_contender, cpu, strict=True)),
            "of_plain": ratio,
        }
    per_entry_us = [it / NUM_SMALL * 1e6 for it in restarts]
    print(
        f"restart, us per entry      {statistics.median(per_entry_us):5.1f} "
        f"({min(per_entry_us):5.1f} to {max(per_entry_us):5.1f})"
    )
    found["restart_us_per_entry"] = statistics.median(per_entry_us)
    result.write("disk", found, environment, args.out)


if __name__ == "__main__":
    main()
