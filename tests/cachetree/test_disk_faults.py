"""The disk store when processes die and bits flip: right bytes, or a miss."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from disk_parts import (
    FAMILY,
    A,
    B,
    check,
    files_bytes,
    num_right,
    open_store,
    page_bytes,
    path_of,
    segment_files,
    text_of,
    views_of,
    write,
)

from cachetree.disk import segment as segments
from cachetree.disk.record import read_head
from cachetree.ids import Kind, ModelId, Span, Step

PARTS = Path(__file__).with_name("disk_parts.py")


def flip(file: Path, byte: int, bit: int = 0) -> None:
    with file.open("r+b") as raw:
        raw.seek(byte)
        old = raw.read(1)[0]
        raw.seek(byte)
        raw.write(bytes([old ^ 1 << bit]))


# Processes that die.


@pytest.mark.parametrize("num_bytes", [64 << 20, 32 << 10], ids=["roomy", "evicting"])
def test_a_killed_writer_loses_at_most_its_last_entry(tmp_path: Path, num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    said: set[tuple[ModelId, str]] = set()
    num_torn = 0
    for seed in range(12):
        command = [sys.executable, str(PARTS), "write", str(tmp_path), str(num_bytes), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            assert writer.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
            lines = [it.split() for it in writer.stdout.read().split("\n")[:-1]]
        said |= {(ModelId(model), text) for model, text in lines}
        assert files_bytes(tmp_path) <= num_bytes
        with open_store(tmp_path, num_bytes=num_bytes) as store:
            counts = store.status().counts
            num_torn += counts.num_torn_tails
            assert counts.num_damaged_entries == 0
            found = {it for it in said if num_right(store, *it) == len(it[1])}
            assert store.status().counts.num_damaged_entries == 0
            assert found == said or num_bytes < 1 << 20, f"seed {seed} lost {said - found}"
            assert found or not said
    assert len(said) > 100, "the writers were killed before they wrote"
    assert num_torn < 12


def test_a_process_killed_at_any_byte_of_a_write_leaves_what_was_there(fast: Path) -> None:
    command = [sys.executable, str(PARTS), "die", str(fast)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_bytes, num_torn = map(int, done.stdout.split())
    # The head comes after the payload: all but the first byte of payload and trailer were torn.
    assert num_torn == 128 + 16 - 1 < num_bytes


def test_a_head_that_was_not_finished_is_a_torn_tail(tmp_path: Path) -> None:
    with open_store(tmp_path / "whole") as store:
        assert write(store, A, "ab")
        assert write(store, A, "abc", start=2)
        place = store.find(A, path_of("abc"))[-1][0].place
        assert place
    whole = segment_files(tmp_path / "whole")[0].read_bytes()[: place.stop - 16]
    torn = [
        whole[:at] + bytes(place.payload - at) + whole[place.payload :]
        for at in range(place.start, place.payload + 1)
    ]
    for _, path in damaged_copies(tmp_path / "whole", torn, tmp_path / "torn"):
        with open_store(path) as store:
            assert num_right(store, A, "abc") == 2
            counts = store.status().counts
            assert (counts.num_torn_tails, counts.num_damaged_entries) == (1, 0)


def test_moved_entries_are_found_again_wherever_they_stand(tmp_path: Path) -> None:
    """Parents that were copied to a newer file than their children's."""
    config = {"num_bytes": 64 << 10}
    is_after = False
    with open_store(tmp_path, **config) as store:
        assert write(store, A, "parent")
        for number in range(1000):
            if number == 20:
                assert write(store, A, "parent and child", start=6)
            assert write(store, B, text_of(number, 4))
            found = [entry.place for entry, _ in store.find(A, path_of("parent and child"))]
            numbers = [place.segment.number for place in found if place]
            is_after = numbers != sorted(numbers)
            if is_after:
                break
        assert is_after
        assert num_right(store, A, "parent and child") == 16
    with open_store(tmp_path, **config) as store:
        assert num_right(store, A, "parent and child") == 16


def test_both_copies_of_a_move_that_was_cut_short_count_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, A, "abc")
        write(store, A, "abcdef", start=3)
    (file,) = segment_files(tmp_path)
    shutil.copy(file, tmp_path / "segment-00000002")
    with open_store(tmp_path) as store:
        assert num_right(store, A, "abcdef") == 6
        assert store.status().num_entries == 2
        live = store.status().num_live_bytes
    with open_store(tmp_path) as store:
        assert store.status().num_live_bytes == live
        assert num_right(store, A, "abcdef") == 6


# Bits that flip, files that shrink or go.


@pytest.fixture(name="fast")
def _fast(tmp_path: Path) -> Iterator[Path]:
    """A place for very many small files: in memory where there is such a place."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


@pytest.fixture(name="small")
def _small(fast: Path) -> Path:
    """A directory with one file of three entries, the second on the first."""
    with open_store(fast / "small") as store:
        assert write(store, A, "ab", e_layers=[1])
        assert write(store, A, "abc", start=2)
        assert write(store, B, "ab", e_layers=[0])
    return fast / "small"


TEXTS = ((A, "ab"), (A, "abc"), (B, "ab"))


def places_in(path: Path) -> list[Span]:
    """Bytes of the three entries of `small`."""
    with open_store(path) as store:
        entries = [store.find(model, path_of(text))[-1][0] for model, text in TEXTS]
        places = [entry.place for entry in entries]
        return [Span(place.start, place.stop) for place in places if place]


def damaged_copies(path: Path, contents: Sequence[bytes], at: Path) -> Iterator[tuple[int, Path]]:
    (file,) = segment_files(path)
    for number, content in enumerate(contents):
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir()
        for name in ("manifest.json", "lock"):
            shutil.copy(path / name, at / name)
        (at / file.name).write_bytes(content)
        yield number, at


def test_any_byte_flipped_while_closed_hurts_only_its_entry(small: Path, fast: Path) -> None:
    whole = segment_files(small)[0].read_bytes()
    first, second, _ = places_in(small)
    flipped = [
        whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))
    ]
    for at, path in damaged_copies(small, flipped, fast / "flipped"):
        with open_store(path) as store:
            right = [num_right(store, model, text) for model, text in TEXTS]
            # The first entry takes the second with it; a lost header takes the file.
            if at < first.start:
                assert right == [0, 0, 0]
            else:
                wanted = (0, 0, 2) if at in first else (2, 2, 2) if at in second else (2, 3, 0)
                assert tuple(right) == wanted, at
            counts = store.status().counts
            assert counts.num_damaged_entries + counts.num_torn_tails >= 1, at
            assert write(store, A, "abc")
            assert write(store, B, "ab")
        with open_store(path) as store:
            assert [num_right(store, model, text) for model, text in TEXTS] == [2, 3, 2], at


def test_any_byte_flipped_while_open_hurts_only_its_entry(small: Path, fast: Path) -> None:
    whole = segment_files(small)[0].read_bytes()
    first, second, third = places_in(small)
    for at, path in damaged_copies(small, [whole] * len(whole), fast / "flipped"):
        with open_store(path) as store:
            flip(segment_files(path)[0], at, at % 8)
            # In this order, as damage is found by reading.
            right_of = {it: num_right(store, *it) for it in ((B, "ab"), (A, "abc"), (A, "ab"))}
            right = [right_of[it] for it in TEXTS]
            damaged = [2, 3, 2]
            if at in first:
                damaged = [0, 0, 2]
            elif at in second:
                damaged = [2, 2, 2]
            elif at in third:
                damaged = [2, 3, 0]
            assert right in ([2, 3, 2], damaged), at
            assert store.status().counts.num_damaged_entries == {7: 0, 2: 2}.get(sum(right), 1)


def test_a_file_cut_anywhere_keeps_what_is_whole(small: Path, fast: Path) -> None:
    whole = segment_files(small)[0].read_bytes()
    spans = places_in(small)
    cuts = [whole[:size] for size in range(len(whole))]
    for size, path in damaged_copies(small, cuts, fast / "cut"):
        wanted = [0, 0, 0]
        for number, span in enumerate(spans):
            if span.stop <= size:
                wanted[number] = len(TEXTS[number][1])
        wanted[1] = max(wanted[1], wanted[0])
        with open_store(path) as store:
            assert [num_right(store, model, text) for model, text in TEXTS] == wanted, size
            assert files_bytes(path) == store.status().num_bytes
        shutil.rmtree(path)
        shutil.copytree(small, path)
        with open_store(path) as store:
            os.truncate(segment_files(path)[0], size)
            num_right(store, A, "abc")
            right = [num_right(store, model, text) for model, text in TEXTS]
            assert all(a >= b for a, b in zip(right, wanted, strict=True)), size


def test_every_flipped_bit_of_a_payload_and_of_a_head_is_detected(tmp_path: Path) -> None:
    """More than 10⁵ single-bit flips."""
    with open_store(tmp_path) as store:
        pages = path_of("".join(map(chr, range(33, 313))))
        assert store.write(A, None, pages, [0], views_of(A, pages))
        ((entry, everything),) = store.find(A, pages)
        place, record = entry.place, entry.record
        assert place
        step = Step(Kind.KV, 0)
        into = memoryview(bytearray(len(pages) * page_bytes(step)))
        num_flips = num_missed = 0
        with place.segment.path.open("r+b", buffering=0) as raw:
            handle = raw.fileno()
            whole = os.pread(handle, place.stop, 0)
            for number, step in enumerate([*(Step(Kind.KV, i) for i in range(3)), Step(Kind.E, 0)]):
                base = place.payload + number * into.nbytes
                segments.read_pages(place, record, step, everything, into)
                for at in range(base, base + into.nbytes):
                    for bit in range(8):
                        os.pwrite(handle, bytes([whole[at] ^ 1 << bit]), at)
                        num_flips += 1
                        try:
                            segments.read_pages(place, record, step, everything, into)
                        except OSError:
                            continue
                        num_missed += 1
                    os.pwrite(handle, whole[at : at + 1], at)
        head = whole[place.start : place.payload]
        # After the marker, without which no record is seen at all.
        for at in range(16, len(head)):
            for bit in range(8):
                bad = head[:at] + bytes([head[at] ^ 1 << bit]) + head[at + 1 :]
                num_flips += 1
                num_missed += read_head(bad, FAMILY) is not None
        assert read_head(head, FAMILY) == record
        assert num_missed == 0
        assert num_flips > 100_000
        check(store, entry)


@pytest.mark.parametrize("fault", ["vanished", "is a directory", "empty"])
def test_a_file_that_goes_is_a_miss_and_the_store_goes_on(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path, segment_bytes=4 << 10) as store:
        assert write(store, A, "abc")
        for number in range(20):
            assert write(store, B, text_of(number, 6))
        old = segment_files(tmp_path)[0]
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
        assert num_right(store, B, text_of(19, 6)) == 6
        assert write(store, A, "abc")
        assert num_right(store, A, "abc") == 3
        # The file that is being written goes too.
        segment_files(tmp_path)[-1].unlink()
        assert num_right(store, A, "abc") == 0
        assert write(store, A, "abc")
        assert num_right(store, A, "abc") == 3
