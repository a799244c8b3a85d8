"""How much of the speed of plain files does the disk store reach?

    python -m benchmarks.disk [--mib 256] [--repetitions 7] [--path DIRECTORY]

Physics: a buffered write copies each byte into the page cache, a warm read copies the byte out, and
a cold read waits for the device. The store adds one checksum per page and layer, of bytes in the
second-level cache. It also adds a header per entry, and one `open` for each layer's KV or E. The
baseline writes the same buffers with `pwritev` to a new file, and reads them with `preadv` into the
same memory. It does so 1 MiB at a time, without checksums. A read is cold after fdatasync and
posix_fadvise(DONTNEED); a hypervisor's cache may still be warm. `restart_us_per_entry` is the time
to open a cache over many small entries.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import xxhash

from benchmarks import result
from benchmarks.races import E_LAYER, FAMILY, MODEL, STEPS, pages_in, race, sizes_of
from cachetree import KV, Cache, CacheConfig, Change, Kind, PageHash, Part, Span, Step, part_of
from cachetree.disk import DiskStore
from cachetree.disk.entry_file import Views
from cachetree.tree import CacheTree

RAW_CHUNK_BYTES = 1 << 20
SMALL = msgspec.structs.replace(FAMILY, page_size=1)
NUM_SMALL = 2000
Work = Callable[[], object]


PARTS = (KV, Part(E_LAYER))


def write(store: DiskStore, pages: Sequence[PageHash], views: Views) -> None:
    for part in PARTS:
        change = Change(added=True, model=MODEL, part=part, parent=None, pages=tuple(pages))
        if not store.write(change, views):
            raise SystemExit("the store did not take the entry")


class Files:
    """The same bytes in memory, in a plain file and in a disk store."""

    def __init__(self, directory: Path, pages: list[PageHash]) -> None:
        self.directory = directory
        self.pages = pages
        sizes = sizes_of(len(pages))
        random = np.random.default_rng(0)
        words = {step: random.integers(0, 1 << 63, size // 8) for step, size in sizes.items()}
        self.written = {step: memoryview(array).cast("B") for step, array in words.items()}
        self.num_bytes = sum(sizes.values())
        self.read_memory = memoryview(bytearray(self.num_bytes))
        self.raw = directory / "raw"
        self.store = self._open()

    def write_raw(self) -> None:
        self.raw.unlink(missing_ok=True)
        with self.raw.open("wb", buffering=0) as file:
            offset = 0
            for view in self.written.values():
                for at in range(0, view.nbytes, RAW_CHUNK_BYTES):
                    part = view[at : at + RAW_CHUNK_BYTES]
                    offset += os.pwritev(file.fileno(), [part], offset)

    def write_store(self) -> None:
        write(self.store, self.pages, self._views)

    def _views(self, step: Step, span: Span) -> list[memoryview]:
        size = self.written[step].nbytes // len(self.pages)
        return [self.written[step][span.start * size : span.stop * size]]

    def renew_store(self) -> None:
        """Replace the store by an empty one, outside of the measured time."""
        self.store.close()
        shutil.rmtree(self.directory / "store")
        self.store = self._open()

    def read_raw(self) -> None:
        with self.raw.open("rb", buffering=0) as file:
            for at in range(0, self.num_bytes, RAW_CHUNK_BYTES):
                os.preadv(file.fileno(), [self.read_memory[at : at + RAW_CHUNK_BYTES]], at)

    def read_store(self) -> None:
        offset = 0
        places = {part: self.store.find(MODEL, self.pages, part) for part in PARTS}
        for step in STEPS:
            for file, span in places[part_of(step)]:
                size = len(span) * self.written[step].nbytes // len(self.pages)
                self.store.read(file, step, span, self.read_memory[offset : offset + size])
                offset += size

    def make_cold(self) -> None:
        for path in (self.raw, *(self.directory / "store").glob("entry-*")):
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.read_memory)

    def _open(self) -> DiskStore:
        tree = CacheTree(FAMILY, host_bytes=0)
        return DiskStore(tree, self.directory / "store", 16 * self.num_bytes)


def compare(files: Files) -> None:
    files.write_raw()
    files.write_store()
    digests = []
    for read in (files.read_raw, files.read_store):
        files.read_memory[:] = bytes(files.num_bytes)
        read()
        digests.append(files.digest())
    state = xxhash.xxh3_128()
    for view in files.written.values():
        state.update(view)
    assert {*digests} == {state.hexdigest()}, f"not the bytes that were written: {digests}"


def measure(files: Files, repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure writes, warm reads and cold reads, and yield a row for each."""

    def row(what: str, plain: Work, store: Work, prepare: Work = lambda: None) -> dict[str, Any]:
        contenders = {"plain": plain, "store": store}
        speeds = race(contenders, files.num_bytes, repetitions, prepare=prepare)
        medians = {name: it.medians() for name, it in speeds.items()}
        return {"what": what, **medians, "of_plain": speeds["store"].of(speeds["plain"])}

    yield row("write", files.write_raw, files.write_store, files.renew_store)
    files.renew_store()
    files.write_store()
    yield row("read, warm", files.read_raw, files.read_store)
    yield row("read, cold", files.read_raw, files.read_store, files.make_cold)


def measure_restarts(directory: Path, repetitions: int) -> list[float]:
    """Seconds per opening of a cache with `NUM_SMALL` entries of one page each."""
    kv, e = (memoryview(bytes(SMALL.page_bytes(kind))) for kind in (Kind.KV, Kind.E))
    path, num_bytes = directory / "restart", 1 << 30
    with closing(DiskStore(CacheTree(SMALL, host_bytes=0), path, num_bytes)) as store:
        for number in range(NUM_SMALL):
            page = PageHash(number.to_bytes(16, "big"))
            write(store, [page], lambda step, span: [kv if step.kind is Kind.KV else e])
    cache = CacheConfig(disk_path=str(path), disk_bytes=num_bytes, host_bytes=0, serves=False)
    seconds = []
    for _ in range(repetitions):
        begun_at_s = time.perf_counter()
        with Cache(SMALL, cache) as opened:
            seconds.append(time.perf_counter() - begun_at_s)
            assert len(opened.match([PageHash((NUM_SMALL - 1).to_bytes(16, "big"))])) == 1
    return seconds


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the entry")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--path", type=Path, default=None, help="on the disk to be measured")
    args = parser.parse_args()
    environment = result.here()
    with tempfile.TemporaryDirectory(dir=args.path) as directory:
        files = Files(Path(directory), pages_in(args.mib))
        compare(files)
        rows = list(measure(files, args.repetitions))
        files.store.close()
        restarts = measure_restarts(Path(directory), args.repetitions)
    results = {
        "mib": args.mib,
        "repetitions": args.repetitions,
        "rows": rows,
        "small_entries": NUM_SMALL,
        "restart_us_per_entry": median(restarts) / NUM_SMALL * 1e6,
    }
    result.write("disk", results, environment, args.json)


if __name__ == "__main__":
    main()
