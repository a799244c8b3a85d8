"""The disk store when processes die and bits flip: a read gives the right bytes, or misses."""

from __future__ import annotations

import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from disk_parts import (
    FAMILY,
    A,
    B,
    change_of,
    check,
    data_files,
    file_of,
    files_bytes,
    num_right,
    open_store,
    page_bytes,
    path_of,
    views_of,
    write,
)

from cachetree.disk import DiskStore
from cachetree.disk.entry_file import (
    MAX_FILE_BYTES,
    Record,
    head_of,
    page_bytes_of,
    read_head,
    read_pages,
    size_of,
)
from cachetree.errors import ConfigError
from cachetree.ids import KV, Kind, ModelId, PageHash, Step, steps_of
from cachetree.memory import Layout

PARTS = Path(__file__).with_name("disk_parts.py")


def flip(file: Path, byte: int, bit: int = 0) -> None:
    with file.open("r+b") as raw:
        raw.seek(byte)
        old = raw.read(1)[0]
        raw.seek(byte)
        raw.write(bytes([old ^ 1 << bit]))


# Processes that die.


@pytest.mark.long
@pytest.mark.parametrize("num_bytes", [64 << 20, 32 << 10], ids=["roomy", "evicting"])
def test_a_killed_writer_loses_at_most_its_last_entry(tmp_path, num_bytes):
    rng = random.Random(num_bytes)
    said: set[tuple[ModelId, str]] = set()
    for seed in range(12):
        command = [sys.executable, str(PARTS), "write", str(tmp_path), str(num_bytes), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            assert writer.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0, 0.1))
            writer.kill()
            lines = [it.split() for it in writer.stdout.read().split("\n")[:-1]]
        said |= {(ModelId(model), text) for model, text in lines}
        assert files_bytes(tmp_path) <= num_bytes
        with open_store(tmp_path, num_bytes=num_bytes) as store:
            assert store.status().counts.num_damaged_entries == 0
            readable = {it for it in said if num_right(store, *it) == len(it[1])}
            assert store.status().counts.num_damaged_entries == 0
            assert readable == said or num_bytes < 1 << 20, f"seed {seed} lost {said - readable}"
            assert readable or not said
    assert len(said) > 100, "the writers were killed before they wrote"


@pytest.mark.parametrize("how", ["die", "starve"])
def test_a_process_killed_anywhere_in_a_write_leaves_what_was_there(fast, how):
    command = [sys.executable, str(PARTS), how, str(fast)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "nobody was killed"


# Bits that flip, files that shrink or go.


@pytest.fixture(name="fast")
def _fast(tmp_path: Path) -> Iterator[Path]:
    """A folder for very many small files, in memory if the machine has such a folder."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


@pytest.fixture(name="small")
def _small(fast: Path) -> Path:
    """A directory with three entries of KV, of which the second depends on the first, and with two
    entries of E."""
    with open_store(fast / "small") as store:
        assert write(store, A, "ab", e_layers=[1])
        assert write(store, A, "abc", start=2)
        assert write(store, B, "ab", e_layers=[0])
    return fast / "small"


NUM_LOST = [3, 1, 2]
"""Number of files that are lost with each damaged file, with the E that needs them."""
TEXTS = ((A, "ab"), (A, "abc"), (B, "ab"))
LEFT = ([0, 0, 2], [2, 2, 2], [2, 3, 0])
"""Number of right pages of each text after each entry was damaged. The second entry depends on the
first."""


def copies(path: Path, to: Path) -> Iterator[tuple[int, int, Path]]:
    """Copy the directory once for each byte of its entries. Yields the number of the entry, the
    position of the byte, and the file."""
    for number, (model, text) in enumerate(TEXTS):
        file = file_of(path, model, text)
        for at in range(file.stat().st_size):
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(path, to)
            yield number, at, to / file.name


def right_in(store: DiskStore) -> list[int]:
    return [num_right(store, model, text) for model, text in TEXTS]


@pytest.mark.long
def test_any_byte_flipped_while_closed_hurts_only_its_entry(small, fast):
    for number, at, file in copies(small, fast / "flipped"):
        flip(file, at, at % 8)
        with open_store(file.parent) as store:
            assert right_in(store) == LEFT[number], at
            assert store.status().counts.num_damaged_entries == NUM_LOST[number], at
            assert files_bytes(file.parent) == store.status().num_bytes
            assert write(store, A, "abc")
            assert write(store, B, "ab")
        with open_store(file.parent) as store:
            assert right_in(store) == [2, 3, 2], at


@pytest.mark.long
def test_any_byte_flipped_while_open_hurts_only_its_entry(small, fast):
    for number, at, file in copies(small, fast / "flipped"):
        with open_store(file.parent) as store:
            flip(file, at, at % 8)
            # In this order, as damage is found by reading.
            right_of = {it: num_right(store, *it) for it in ((B, "ab"), (A, "abc"), (A, "ab"))}
            right = [right_of[it] for it in TEXTS]
            assert right in ([2, 3, 2], LEFT[number]), at
            num_lost = 0 if right == [2, 3, 2] else NUM_LOST[number]
            assert store.status().counts.num_damaged_entries == num_lost


@pytest.mark.long
def test_a_file_cut_anywhere_hurts_only_its_entry(small, fast):
    for number, size, file in copies(small, fast / "cut"):
        os.truncate(file, size)
        with open_store(file.parent) as store:
            assert right_in(store) == LEFT[number], size
            assert store.status().counts.num_damaged_entries == NUM_LOST[number]
            assert not file.exists()
            assert files_bytes(file.parent) == store.status().num_bytes
        shutil.rmtree(file.parent)
        shutil.copytree(small, file.parent)
        with open_store(file.parent) as store:
            os.truncate(file, size)
            num_right(store, A, "abc")
            assert right_in(store) == LEFT[number] or size > file.stat().st_size // 2, size


def test_a_size_that_cannot_be_is_not_allocated(small):
    """The file is as long as its prefix says, and empty behind the prefix."""
    file = file_of(small, A, "abc")
    head = file.read_bytes()[:8]
    file.write_bytes(head + struct.pack("<QQ", 1 << 40, 0))
    os.truncate(file, 1 << 41)
    with open_store(small) as store:
        assert right_in(store) == LEFT[1]
        assert store.status().counts.num_damaged_entries == 1
    assert not file.exists()


def test_an_entry_that_is_there_twice_counts_once(small):
    file = file_of(small, A, "ab")
    copy = file.with_name(file.name[:-12] + "0" * 12)
    shutil.copy(file, copy)
    with open_store(small) as store:
        assert right_in(store) == [2, 3, 2]
        assert store.status().num_entries == 5
        assert store.status().num_bytes == files_bytes(small)
    assert not copy.exists()


def test_files_of_others_stay_untouched(small):
    """The files have names of another form."""
    name = data_files(small)[-1].name
    (small / "letter.txt").write_text("dear")
    (small / f"{name}.bak").write_text("dear")
    (small / "folder").mkdir()
    with open_store(small) as store:
        assert right_in(store) == [2, 3, 2]
        assert store.status().counts.num_damaged_entries == 0
        assert write(store, A, "abcdef")
    assert (small / "letter.txt").read_text() == (small / f"{name}.bak").read_text() == "dear"
    with open_store(small) as store:
        assert num_right(store, A, "abcdef") == 6


def test_a_sound_file_of_another_family_is_read_under_no_name(small, tmp_path):
    other = msgspec.structs.replace(FAMILY, tokenizer="another")
    with open_store(tmp_path / "other", family=other) as store:
        assert write(store, A, "other")
    (theirs,) = data_files(tmp_path / "other")
    ours, placed = data_files(small)[-1].name, small / theirs.name
    shutil.copy(theirs, placed)
    with pytest.raises(ConfigError, match=f"{theirs.name} of another family"):
        open_store(small)
    assert placed.read_bytes() == theirs.read_bytes()
    placed.rename(small / f"{ours[:-32]}{theirs.name[-32:]}")
    with open_store(small) as store:
        assert right_in(store) == [2, 3, 2]
        assert num_right(store, A, "other") == 0
        assert store.status().counts.num_damaged_entries == 1
        assert store.status().num_bytes == files_bytes(small)


@pytest.mark.long
def test_every_flipped_bit_of_a_file_is_detected(tmp_path):
    """The test flips more than 10⁵ single bits."""
    with open_store(tmp_path) as store:
        pages = path_of("".join(map(chr, range(33, 313))))
        assert store.write(change_of(A, pages), views_of(A, pages))
        ((entry, everything),) = store.find(A, pages)
        (file,) = data_files(tmp_path)
        steps = steps_of(KV, FAMILY.num_layers)
        payload = file.stat().st_size - entry.layout.num_bytes
        sums_bytes = 8 * len(pages)
        into = memoryview(bytearray(len(pages) * page_bytes(Step(Kind.KV, 0))))
        num_flips = num_missed = 0
        with file.open("r+b", buffering=0) as raw:
            handle = raw.fileno()
            whole = file.read_bytes()
            for number, step in enumerate(steps):
                base = payload + number * into.nbytes
                sums = payload - (len(steps) - number) * sums_bytes
                read_pages(file, entry.layout, step, everything, into)
                for at in (*range(base, base + into.nbytes), *range(sums, sums + sums_bytes)):
                    for bit in range(8):
                        os.pwrite(handle, bytes([whole[at] ^ 1 << bit]), at)
                        num_flips += 1
                        try:
                            read_pages(file, entry.layout, step, everything, into)
                        except OSError:
                            continue
                        num_missed += 1
                    os.pwrite(handle, whole[at : at + 1], at)
        head = whole[: payload - len(steps) * sums_bytes]
        for at in range(len(head)):
            for bit in range(8):
                bad = head[:at] + bytes([head[at] ^ 1 << bit]) + head[at + 1 :]
                num_flips += 1
                num_missed += read_head(bad, len(whole), FAMILY) is not None
        assert read_head(head, len(whole), FAMILY) == entry.record
        assert num_missed == 0
        assert num_flips > 100_000
        check(store, entry)


def test_the_head_of_the_largest_file_is_not_too_large_to_be_read():
    """The file has the smallest pages that are possible."""
    family = msgspec.structs.replace(FAMILY, num_layers=1, head_dim=1)
    num_pages = MAX_FILE_BYTES // page_bytes_of(Layout.of(family, 1, KV))
    layout = Layout.of(family, num_pages, KV)
    pages = tuple(PageHash(number.to_bytes(16, "big")) for number in range(layout.num_pages))
    record = Record(family=family.digest, model=A, part=KV, num_before=0, parent=None, pages=pages)
    num_bytes = size_of(record, layout)
    assert read_head(head_of(record), num_bytes, family) == record
    assert 0 <= num_bytes - MAX_FILE_BYTES < 300


@pytest.mark.parametrize("fault", ["vanished", "is a directory", "empty"])
def test_a_file_that_goes_is_a_miss_and_the_store_goes_on(tmp_path, fault, caplog):
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
        assert write(store, B, "other")
        old = file_of(tmp_path, A, "abc")
        if fault == "empty":
            os.truncate(old, 0)
        else:
            old.unlink()
            if fault == "is a directory":
                old.mkdir()
        with caplog.at_level(logging.WARNING):
            assert num_right(store, A, "abc") == 0
        assert old.name in caplog.text
        assert store.status().counts.num_damaged_entries == 1
        assert num_right(store, B, "other") == 5
        if fault != "is a directory":  # Which takes the name of these pages.
            assert write(store, A, "abc")
            assert num_right(store, A, "abc") == 3
