"""A small family, entries whose content can be recomputed, and processes that write them.

Run as a script:

    disk_parts.py write PATH NUM_BYTES SEED   write random entries for ever, name each that is in
    disk_parts.py die PATH                    be killed at every byte of a write, and look
    disk_parts.py full PATH                   fill a file system of 128 KiB of its own
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

from cachetree.checkpoint.family import Family
from cachetree.disk import DiskConfig, DiskEntry, DiskStore
from cachetree.errors import StaleEntry
from cachetree.ids import Kind, ModelId, PageHash, Span, Step

FAMILY = Family(
    architecture="LlamaForCausalLM",
    num_layers=3,
    hidden_size=8,
    num_kv_heads=1,
    head_dim=4,
    rope="{}",
    tokenizer="t",
    model_dtype="float16",
    kv_dtype="float16",
    page_size=1,
)
A, B = ModelId("a"), ModelId("b")
BUDGET = 1 << 20


def path_of(text: str) -> list[PageHash]:
    """One page per character; its hash covers the characters before it."""
    return [
        PageHash(hashlib.sha256(text[: i + 1].encode()).digest()[:16]) for i in range(len(text))
    ]


def page_bytes(step: Step, family: Family = FAMILY) -> int:
    return family.page_bytes(step.kind)


def text_of(number: int, length: int) -> str:
    """Texts of different numbers share no page."""
    return chr(1000 + number) + "f" * (length - 1)


def content(
    model: ModelId, pages: Sequence[PageHash], step: Step, family: Family = FAMILY
) -> bytes:
    seed = f"{model}{step.kind.value}{step.layer}".encode()
    size = page_bytes(step, family)
    return b"".join(hashlib.shake_128(seed + page).digest(size) for page in pages)


def views_of(
    model: ModelId, pages: Sequence[PageHash], num_runs: int = 1
) -> Callable[[Step], list[memoryview]]:
    """The content of the pages, cut into runs as it may lie in memory."""

    def views(step: Step) -> list[memoryview]:
        cuts = [i * len(pages) // num_runs for i in range(num_runs + 1)]
        runs = [pages[a:b] for a, b in itertools.pairwise(cuts)]
        return [memoryview(content(model, run, step)) for run in runs]

    return views


def config_of(path: Path, num_bytes: int = BUDGET, segment_bytes: int = 1 << 30) -> DiskConfig:
    return DiskConfig(path=str(path), num_bytes=num_bytes, segment_bytes=segment_bytes)


def open_store(path: Path, **config: int) -> DiskStore:
    return DiskStore(FAMILY, config_of(path, **config))


def write(
    store: DiskStore,
    model: ModelId,
    text: str,
    start: int = 0,
    e_layers: Sequence[int] = (),
    num_runs: int = 1,
) -> bool:
    """Write the pages of `text` from page `start` on."""
    pages = path_of(text)
    parent = pages[start - 1] if start else None
    new = pages[start:]
    return store.write(model, parent, new, e_layers, views_of(model, new, num_runs))


def steps_of(entry: DiskEntry) -> list[Step]:
    layout = entry.record.layout
    kv = [Step(Kind.KV, layer) for layer in range(layout.num_layers)]
    return kv + [Step(Kind.E, layer) for layer in layout.e_layers]


def check(store: DiskStore, entry: DiskEntry, pages: Span | None = None) -> None:
    """Raises StaleEntry for a miss; anything but the right bytes fails the test."""
    span = pages or Span(0, len(entry.record.pages))
    for step in steps_of(entry):
        into = memoryview(bytearray(len(span) * page_bytes(step)))
        store.read(entry, step, span, into)
        expected = content(entry.record.model, entry.record.pages[span.start : span.stop], step)
        assert into == expected, f"wrong bytes at {step}"


def num_right(store: DiskStore, model: ModelId, text: str) -> int:
    """How many leading pages of `text` can be read; all that is read is compared."""
    num = 0
    for entry, span in store.find(model, path_of(text)):
        try:
            check(store, entry, span)
        except StaleEntry:
            break
        num += len(span)
    return num


def files_bytes(path: Path) -> int:
    return sum(it.stat().st_size for it in path.iterdir())


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("segment-*"))


def random_texts(seed: int) -> Callable[[], tuple[ModelId, str, int, list[int]]]:
    """What a writer writes: models, texts that share prefixes, where they start, layers with E."""
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


def _die_everywhere(path: Path) -> None:
    """The kernel kills a process that writes past its limit on the size of files."""
    before, after = path / "before", path / "after"
    with open_store(before) as store:
        assert write(store, A, "abc", e_layers=[1])
    shutil.copytree(before, after)
    with open_store(after) as store:
        assert write(store, A, "abcde", start=3, e_layers=[0])
    start, stop = (segment_files(it)[0].stat().st_size for it in (before, after))
    num_torn = 0
    for limit in range(start, stop + 1):
        shutil.rmtree(after)
        shutil.copytree(before, after)
        child = os.fork()
        if not child:
            with open_store(after) as store:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                write(store, A, "abcde", start=3, e_layers=[0])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert (os.WTERMSIG(status) == signal.SIGXFSZ) == (limit < stop), (limit, status)
        with open_store(after) as store:
            assert num_right(store, A, "abcde") == (5 if limit == stop else 3), limit
            num_torn += store.status().counts.num_torn_tails
            assert store.status().counts.num_damaged_entries == 0
            assert write(store, A, "abcdefg", start=3)
            assert num_right(store, A, "abcdefg") == 7
    print(stop - start, num_torn)


def _fill(path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)]
    subprocess.run(mount, check=True)
    disk = path / "disk"
    with open_store(disk, segment_bytes=24 << 10) as store:
        assert write(store, A, "first")
        names = [text_of(number, 20) for number in range(200)]
        written = [name for name in names if write(store, B, name)]
        assert 20 < len(written) < 150, len(written)
        assert store.status().counts.num_failed_writes > 0
        assert num_right(store, A, "first") == 5
        assert all(num_right(store, B, name) == 20 for name in written)
        assert files_bytes(disk) == store.status().num_bytes
        for name in written[:60]:
            assert store.remove(B, path_of(name)[-1]), "a full disk kept an entry from going"
        assert num_right(store, B, written[0]) == 0
        assert store.status().counts.num_damaged_entries == 0
    with open_store(disk, segment_bytes=24 << 10) as store:
        assert num_right(store, B, written[0]) == 0, "a full disk brought an entry back"
        assert all(num_right(store, B, name) == 20 for name in written[60:])
    with open_store(disk, segment_bytes=8 << 10, num_bytes=64 << 10) as store:
        assert files_bytes(disk) <= 64 << 10
        assert write(store, B, "there is room again")
        assert num_right(store, B, "there is room again") == 19
    print("full")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        _write_for_ever(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "die":
        _die_everywhere(Path(sys.argv[2]))
    else:
        _fill(Path(sys.argv[2]))
