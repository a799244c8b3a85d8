"""A small family, entries with content that can be recomputed, and processes that write them.

Run as a script:

    disk_parts.py write PATH NUM_BYTES SEED   write random entries for ever; print each written one
    disk_parts.py die PATH                    be killed before and after every step of a write
    disk_parts.py starve PATH                 be killed at every second byte of a write
    disk_parts.py full PATH                   fill a separate file system of 128 KiB
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from profile_parts import HALF, family
from tree_parts import path as path_of

from cachetree.checkpoint import Family
from cachetree.disk import DiskFile, DiskStore, entry_file
from cachetree.errors import StaleEntry
from cachetree.ids import KV, Kind, ModelId, Part, Span, Step, steps_of
from cachetree.tree import CacheTree, Change

FAMILY = family(num_layers=3, num_kv_heads=1, head_dim=4, page_size=1, **HALF)
A, B = ModelId("a"), ModelId("b")
BUDGET = 1 << 20


def page_bytes(step: Step, family: Family = FAMILY) -> int:
    return family.page_bytes(step.kind)


def text_of(number: int, length: int) -> str:
    """Return a text. Texts of different numbers share no page."""
    return chr(1000 + number) + "f" * (length - 1)


def content(model, pages, step, family=FAMILY):
    seed = f"{model}{step.kind.value}{step.layer}".encode()
    size = page_bytes(step, family)
    return b"".join(hashlib.shake_128(seed + page).digest(size) for page in pages)


def views_of(model, pages, num_runs=1):
    """Return the content of the pages, cut into runs as it may be in memory."""

    def views(step: Step, span: Span) -> list[memoryview]:
        cuts = [span.start + i * len(span) // num_runs for i in range(num_runs + 1)]
        runs = [pages[a:b] for a, b in itertools.pairwise(cuts)]
        return [memoryview(content(model, run, step)) for run in runs]

    return views


def change_of(model, pages, parent=None, part=KV):
    """Return the change that adds these pages."""
    return Change(added=True, model=model, part=part, parent=parent, pages=tuple(pages))


class Opened(DiskStore):
    """A store that is closed at the end of its context."""

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(path: Path, num_bytes: int = BUDGET, family: Family = FAMILY) -> Opened:
    return Opened(CacheTree(family, host_bytes=0), path, num_bytes)


def write(store, model, text, start=0, e_layers=(), num_runs=1):
    """Write KV, then E, of the pages of `text` from page `start` on."""
    pages = path_of(text)
    parent = pages[start - 1] if start else None
    new = pages[start:]
    return all(
        store.write(change_of(model, new, parent, part), views_of(model, new, num_runs))
        for part in (KV, *map(Part, e_layers))
    )


def check(store: DiskStore, file: DiskFile, pages: Span | None = None) -> None:
    """Check the pages of a file. Raises StaleEntry for a miss; wrong bytes fail the test."""
    record = file.record
    span = pages or Span(0, len(record.pages))
    for step in steps_of(record.part, file.layout.num_steps):
        into = memoryview(bytearray(len(span) * page_bytes(step)))
        store.read(file, step, span, into)
        expected = content(record.model, record.pages[span.start : span.stop], step)
        assert into == expected, f"wrong bytes at {step}"


def num_right(store: DiskStore, model: ModelId, text: str, part: Part = KV) -> int:
    """Return how many leading pages of `text` can be read. All bytes that are read are compared."""
    num = 0
    for file, span in store.find(model, path_of(text), part):
        try:
            check(store, file, span)
        except StaleEntry:
            break
        num += len(span)
    return num


def files_bytes(path: Path) -> int:
    return sum(it.stat().st_size for it in path.iterdir())


def data_files(path: Path) -> list[Path]:
    """Files that hold entries, in the order in which they were begun."""
    files = (it for it in path.iterdir() if it.name != "cachetree.lock")
    return sorted(files, key=lambda it: it.stat().st_mtime_ns)


def place_of(path: Path, bytes_there: bytes) -> tuple[Path, int]:
    """Return the file that holds these bytes, and their position in it."""
    for file in data_files(path):
        at = file.read_bytes().find(bytes_there)
        if at >= 0:
            return file, at
    raise LookupError(f"{path} does not hold {len(bytes_there)} bytes")


def file_of(path: Path, model: ModelId, text: str) -> Path:
    """Return the file that holds the last page of `text`."""
    return place_of(path, content(model, path_of(text)[-1:], Step(Kind.KV, 0)))[0]


def random_texts(seed: int) -> Callable[[], tuple[ModelId, str, int, list[int]]]:
    """Draw entries for a writer: models, texts with shared prefixes, start pages, layers with E."""
    rng = random.Random(seed)
    known = [""]

    def draw() -> tuple[ModelId, str, int, list[int]]:
        prefix = rng.choice(known[-20:])
        prefix = prefix[: rng.randint(0, len(prefix))] if len(prefix) < 60 else ""
        text = prefix + "".join(rng.choices("ab", k=rng.randint(1, 20)))
        known.append(text)
        model = rng.choice([A, B])
        return model, text, 0, rng.sample(range(3), rng.randint(0, 2))

    return draw


def _write_for_ever(path: Path, num_bytes: int, seed: int) -> None:
    draw = random_texts(seed)
    with open_store(path, num_bytes=num_bytes) as store:
        print("open", flush=True)
        while True:
            model, text, start, e_layers = draw()
            if write(store, model, text, start, e_layers):
                print(model, text, flush=True)


class _Steps:
    """Kill this process before or after the n-th of certain calls: calls that change a directory or
    a file, and calls right before a write to a file."""

    NAMES = ("open", "write", "pwrite", "ftruncate", "truncate", "rename", "replace", "link")
    NAMES += ("unlink", "remove", "close")

    def __init__(self, number: int, is_after: bool) -> None:
        self.left = number
        self.is_after = is_after
        for name in self.NAMES:
            setattr(os, name, self._counting(getattr(os, name)))
        for name in ("head_of", "_checksums"):
            setattr(entry_file, name, self._counting(getattr(entry_file, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if not self.left and not self.is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = call(*args, **kwargs)
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return counted


BEFORE = (("abc", 0, (1,)), ("abxyz", 2, ()))
"""Texts, each with its start page and its layers with E."""


def _write_all(store: DiskStore, entries: Sequence[tuple[str, int, Sequence[int]]]) -> None:
    for text, start, e_layers in entries:
        assert write(store, A, text, start, e_layers)


def _die_everywhere(path: Path) -> None:
    """Write new pages, E for pages that exist, and both while other entries have to be evicted."""
    cases = [
        (("abcde", 3, (1,)), BUDGET),
        (("abcde", 0, (0, 1)), BUDGET),
        (("abc" + "m" * 30, 3, (1,)), 16 << 10),
    ]
    before, after = path / "before", path / "after"
    with open_store(before) as store:
        _write_all(store, [(text_of(number, 12), 0, ()) for number in range(14)])
        _write_all(store, BEFORE)
    num_killed = 0
    for entry, num_bytes in cases:
        for is_after in (False, True):
            for number in itertools.count(1):
                shutil.rmtree(after, ignore_errors=True)
                shutil.copytree(before, after)
                child = os.fork()
                if not child:
                    with open_store(after, num_bytes) as store:
                        _Steps(number, is_after)
                        _write_all(store, [entry])
                        os._exit(0)
                _, status = os.waitpid(child, 0)
                is_killed = os.WIFSIGNALED(status)
                assert is_killed or status == 0, status
                num_killed += is_killed
                _look(after, entry[0], num_bytes, is_killed)
                if not is_killed:
                    break
    print(num_killed)


def _look(path: Path, text: str, num_bytes: int, is_killed: bool) -> None:
    assert files_bytes(path) <= num_bytes
    with open_store(path, num_bytes=num_bytes) as store:
        is_clean = store.status().num_bytes == files_bytes(path)
        assert is_clean, "something was left of a dead process"
        assert num_right(store, A, text) >= (3 if is_killed else len(text))
        assert num_right(store, A, "abxyz") == 5
        assert store.status().counts.num_damaged_entries == 0
        assert write(store, A, text + "fg")
        assert num_right(store, A, text + "fg") == len(text) + 2
    with open_store(path, num_bytes=num_bytes) as store:
        assert num_right(store, A, text + "fg") == len(text) + 2


def _starve(path: Path) -> None:
    """The kernel kills a process that writes past its limit on the size of files."""
    before, after = path / "before", path / "after"
    with open_store(before) as store:
        _write_all(store, BEFORE)
    limit = num_killed = 0
    while True:
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(before, after)
        child = os.fork()
        if not child:
            with open_store(after) as store:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                _write_all(store, [("abcde", 3, (1,))])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        is_killed = os.WIFSIGNALED(status)
        assert (os.WTERMSIG(status) == signal.SIGXFSZ) if is_killed else status == 0
        _look(after, "abcde", BUDGET, is_killed)
        if not is_killed:
            print(num_killed)
            return
        num_killed += 1
        limit += 2


def _fill(path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)]
    subprocess.run(mount, check=True)
    disk = path / "disk"
    with open_store(disk) as store:
        assert write(store, A, "first")
        names = [text_of(number, 20) for number in range(200)]
        written = [name for name in names if write(store, B, name)]
        assert 20 < len(written) < 190, len(written)
        assert store.status().counts.num_failed_writes > 0
        assert num_right(store, A, "first") == 5
        assert all(num_right(store, B, name) == 20 for name in written)
        assert files_bytes(disk) == store.status().num_bytes
        for name in written[:15]:
            assert store.evict(B, path_of(name)), "a full disk kept an entry from going"
        assert num_right(store, B, written[0]) == 0
        assert store.status().counts.num_damaged_entries == 0
    with open_store(disk) as store:
        assert num_right(store, B, written[0]) == 0, "a full disk brought an entry back"
        assert all(num_right(store, B, name) == 20 for name in written[15:])
    with open_store(disk, num_bytes=64 << 10) as store:
        assert files_bytes(disk) <= 64 << 10
        assert write(store, B, "there is room again")
        assert num_right(store, B, "there is room again") == 19
    print("full")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        _write_for_ever(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "die":
        _die_everywhere(Path(sys.argv[2]))
    elif sys.argv[1] == "starve":
        _starve(Path(sys.argv[2]))
    else:
        _fill(Path(sys.argv[2]))
