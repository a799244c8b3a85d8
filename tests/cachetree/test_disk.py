"""The disk store in one situation per test: entries that are found again, refused or evicted."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from disk_parts import (
    FAMILY,
    A,
    B,
    Opened,
    change_of,
    check,
    content,
    data_files,
    files_bytes,
    num_right,
    open_store,
    page_bytes,
    path_of,
    place_of,
    text_of,
    views_of,
    write,
)

from cachetree.checkpoint import Family
from cachetree.disk import DiskFile, DiskStore, entry_file
from cachetree.errors import StaleEntry
from cachetree.ids import KV, Kind, PageHash, Part, Span, Step, part_of, steps_of
from cachetree.tree import CacheTree, Change


def only(store: DiskStore, text: str, part: Part = KV) -> DiskFile:
    ((file, _),) = store.find(A, path_of(text), part)
    return file


@pytest.mark.parametrize("span", [Span(0, 6), Span(0, 1), Span(5, 6), Span(2, 4), Span(3, 3)])
def test_some_pages_of_one_layer_are_read_alone(tmp_path, span):
    with open_store(tmp_path) as store:
        write(store, A, "abcdef", e_layers=[1])
        for part in (KV, Part(1)):
            check(store, only(store, "abcdef", part), span)


def test_a_read_of_some_pages_verifies_its_own_bytes_only(tmp_path):
    """KV has pages of 128 KiB, two of which are read at once. E has smaller pages."""
    family = Family(**(msgspec.structs.asdict(FAMILY) | {"head_dim": 1024, "page_size": 32}))
    steps = [*steps_of(KV, family.num_layers), Step(Kind.E, 2)]
    kv = Step(Kind.KV, 1)
    size_of = {step: page_bytes(step, family) for step in steps}
    assert (size_of[kv], size_of[steps[-1]]) == (128 << 10, 512)
    pages = path_of("abcdefg")
    rng = np.random.default_rng(0)
    written = {it: rng.integers(0, 256, 7 * size_of[it], dtype=np.uint8).data for it in steps}

    def views(step: Step, span: Span) -> list[memoryview]:
        return [written[step][span.start * size_of[step] : span.stop * size_of[step]]]

    def read(store: DiskStore, step: Step, span: Span) -> None:
        into = memoryview(bytearray(len(span) * size_of[step]))
        store.read(only(store, "abcdefg", part_of(step)), step, span, into)
        assert [into] == views(step, span)

    with open_store(tmp_path, 1 << 30, family) as store:
        for part in (KV, Part(2)):
            assert store.write(change_of(A, pages, None, part), views)
        for step in steps:
            for start in range(7):
                for stop in range(start, 8):
                    read(store, step, Span(start, stop))
        file, at = place_of(tmp_path, bytes(views(kv, Span(4, 5))[0][:64]))
        with file.open("r+b") as raw:
            raw.seek(at)
            raw.write(bytes(64))
        read(store, steps[0], Span(0, 7))
        read(store, kv, Span(0, 4))
        read(store, kv, Span(5, 7))
        with pytest.raises(StaleEntry, match="checksum"):
            read(store, kv, Span(3, 7))
        assert store.find(A, pages) == store.find(A, pages, Part(2)) == []
        assert store.status().counts.num_damaged_entries == 2, "E goes with its KV"


def test_pages_after_a_missing_parent_or_in_contradiction_are_refused(tmp_path):
    with open_store(tmp_path) as store:
        write(store, B, "abcde")
        assert not write(store, A, "abcde", start=3)
        pages = path_of("ab")
        twice = [pages[0], pages[1], pages[0]]
        assert not store.write(change_of(A, twice), views_of(A, twice))
        assert write(store, A, "abc")
        above_itself = [*path_of("abcd")[3:], pages[0]]
        for looped in (pages[:1], above_itself):
            change = change_of(A, looped, path_of("abc")[2])
            assert store.write(change, views_of(A, looped)) == (looped == pages[:1])
        assert not write(store, A, "abcd", e_layers=[0], start=3)
        assert write(store, A, "abc", e_layers=[0])
        jumped = [*path_of("xy"), *path_of("a")]
        assert not store.write(change_of(A, jumped), views_of(A, jumped))
        with pytest.raises(ValueError, match=r"has 4 bytes where 64 belong"):
            store.write(change_of(A, path_of("wxyz")), lambda step, span: [memoryview(b"1234")])
        assert num_right(store, A, "wxyz") == 0
        assert write(store, A, "wxyz")
    with open_store(tmp_path) as store:
        assert [num_right(store, A, it) for it in ("abcd", "wxyz", "xy")] == [4, 4, 0]


def test_bytes_that_are_taken_away_during_the_write_never_count(tmp_path):
    pages = path_of("abc")
    views = views_of(A, pages)
    num_calls = 0

    def failing(step: Step, span: Span) -> list[memoryview]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise StaleEntry("the lease has ended")
        return views(step, span)

    with open_store(tmp_path) as store:
        with pytest.raises(StaleEntry, match="lease"):
            store.write(change_of(A, pages), failing)
        assert num_calls == 4, "not asked again before the commit"
        assert num_right(store, A, "abc") == 0
        assert store.status().num_bytes == files_bytes(tmp_path)
        assert write(store, A, "abc")
        assert num_right(store, A, "abc") == 3


def test_large_entries_are_cut_into_parts(tmp_path):
    text = "a" * 500
    with open_store(tmp_path, num_bytes=128 << 10) as store:
        assert write(store, A, text, e_layers=[0, 1, 2], num_runs=7)
        assert num_right(store, A, text) == 500
        assert store.status().num_entries > 4
        assert max(it.stat().st_size for it in data_files(tmp_path)) < (16 << 10) + 300
    with open_store(tmp_path, num_bytes=128 << 10) as store:
        assert num_right(store, A, text) == 500


def test_pages_that_all_lie_apart_are_written_too(tmp_path):
    num = 2048
    with open_store(tmp_path, num_bytes=16 << 20) as store:
        assert write(store, A, "a" * num, e_layers=[1], num_runs=num)
        assert num_right(store, A, "a" * num) == num
        assert store.status().num_entries == 2


def test_the_least_recently_used_goes_first_and_parents_outlive_children(tmp_path):
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert write(store, A, "s" * 10)
        assert write(store, A, "s" * 10 + "old", start=10)
        assert write(store, A, "s" * 10 + "used", start=10)
        for number in range(200):
            assert write(store, A, text_of(number, 8))
            assert num_right(store, A, "s" * 10 + "used") == 14
            assert files_bytes(tmp_path) <= 16 << 10
        assert num_right(store, A, "s" * 10 + "old") == 10
        status = store.status()
        assert status.counts.num_evicted_entries > 100
        left = [n for n in range(200) if num_right(store, A, text_of(n, 8)) == 8]
        assert left == list(range(left[0], 200)), "not the oldest went"
        num_pages = status.num_pages
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert num_right(store, A, "s" * 10 + "used") == 14
        assert store.status().num_pages == num_pages
        assert [n for n in range(200) if num_right(store, A, text_of(n, 8)) == 8] == left


def test_parents_of_new_pages_are_not_evicted_for_them(tmp_path):
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert write(store, A, "parent")
        before = files_bytes(tmp_path)
        assert write(store, A, text_of(0, 1))
        one = files_bytes(tmp_path) - before
        number = 0
        while files_bytes(tmp_path) + 2 * one <= 16 << 10:
            number += 1
            assert write(store, A, text_of(number, 1))
        assert store.status().counts.num_evicted_entries == 0
        text = "parent" + "c" * 40
        assert write(store, A, text, start=6)
        assert store.status().counts.num_evicted_entries > 0
        assert num_right(store, A, text) == 46


def test_a_smaller_budget_is_kept_from_the_start(tmp_path):
    with open_store(tmp_path, num_bytes=64 << 10) as store:
        for number in range(200):
            write(store, A, f"{number:03}" + "f" * 5)
    assert files_bytes(tmp_path) > 16 << 10
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert files_bytes(tmp_path) <= 16 << 10
        assert store.status().num_bytes == files_bytes(tmp_path)
        assert num_right(store, A, "199fffff") == 8
        assert write(store, A, "new")


def test_entry_larger_than_the_budget_evicts_nothing(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        write(store, A, "kept")
        monkeypatch.setattr(store, "_budget_bytes", 100)
        write(store, A, "new")
        assert (num_right(store, A, "kept"), num_right(store, A, "new")) == (4, 0)


def test_the_tree_shows_all_that_is_there_and_nothing_else(tmp_path):
    texts = [f"{number % 7}" + "f" * (number % 11 + 1) for number in range(60)]

    def shown(tree: CacheTree) -> set[tuple[str, int]]:
        return {
            (text, it.num_pages) for text in texts for it in tree.match(path_of(text), is_use=False)
        }

    heard: set[tuple[Part, PageHash]] = set()

    def hear(change: Change) -> None:
        named = {(change.part, page) for page in change.pages}
        (heard.update if change.added else heard.difference_update)(named)

    tree, again = (CacheTree(FAMILY, host_bytes=0) for _ in range(2))
    tree.subscribe_kept(hear)
    with Opened(tree, tmp_path, 8 << 10) as store:
        for number, text in enumerate(texts):
            write(store, A, text, e_layers=[1] if number % 2 else [])
            assert shown(tree) == {
                (text, num) for text in texts if (num := num_right(store, A, text))
            }
        assert store.status().counts.num_evicted_entries > 10
        assert sum(part == KV for part, _ in heard) == store.status().num_pages
    with Opened(again, tmp_path, 8 << 10):
        assert shown(again) == shown(tree)


def test_after_close_reads_miss_and_writes_fail(tmp_path):
    store = open_store(tmp_path)
    write(store, A, "abc")
    entry = only(store, "abc")
    store.close()
    store.close()
    with pytest.raises(StaleEntry):
        check(store, entry)
    assert not write(store, A, "xyz")


def test_reads_beside_writes_and_evictions_are_right_or_miss(tmp_path):
    is_over = threading.Event()
    failures: list[Exception] = []
    num_read = [0] * 3

    with open_store(tmp_path, num_bytes=24 << 10) as store:

        def read(number: int) -> None:
            rng = np.random.default_rng(number)
            try:
                while not is_over.is_set():
                    num_read[number] += num_right(store, A, f"{rng.integers(60):03}" + "f" * 9)
            except (AssertionError, OSError, RuntimeError, ValueError, LookupError) as exc:
                failures.append(exc)

        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        rng = np.random.default_rng(99)
        num_writes = 0
        while num_writes < 1500 or (min(num_read) <= 100 and num_writes < 50_000):
            write(store, A, f"{rng.integers(60):03}" + "f" * int(rng.integers(10)))
            assert store.status().num_bytes <= 24 << 10
            num_writes += 1
        is_over.set()
        for reader in readers:
            reader.join(60)
        assert not failures
        assert min(num_read) > 100
        counts = store.status().counts
        assert counts.num_damaged_entries == 0, "a reader took an eviction for damage"
        assert counts.num_evicted_entries > 100
        assert store.status().num_bytes == files_bytes(tmp_path)


@pytest.mark.parametrize("when", ["before it is opened", "while it is read"])
def test_entry_removed_during_a_read_is_right_or_a_miss_and_no_damage(tmp_path, monkeypatch, when):
    with open_store(tmp_path) as store:
        assert write(store, A, "first")
        entry = only(store, "first")
        owner: object = Path if when == "before it is opened" else entry_file
        name = "open" if when == "before it is opened" else "_checksums"
        real = getattr(owner, name)

        def removing(*args: object, **kwargs: object) -> object:
            monkeypatch.setattr(owner, name, real)
            assert store.evict(A, path_of("f"))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, removing)
        with contextlib.suppress(StaleEntry):
            check(store, entry)
        assert getattr(owner, name) is real, "nothing was removed"
        with pytest.raises(StaleEntry, match="no longer on disk"):
            check(store, entry)
        assert num_right(store, A, "first") == 0
        assert store.status().counts.num_damaged_entries == 0
        assert store.status().num_bytes == files_bytes(tmp_path)


def test_a_read_into_the_wrong_room_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        write(store, A, "abc", e_layers=[1])
        entry = only(store, "abc")
        step = Step(Kind.KV, 0)
        with pytest.raises(ValueError, match="bytes do not fit into 5"):
            store.read(entry, step, Span(0, 3), memoryview(bytearray(5)))
        with pytest.raises(ValueError, match="exceeds the 3 pages"):
            store.read(entry, step, Span(0, 4), memoryview(bytearray(4 * page_bytes(step))))
        halves = np.zeros(3 * page_bytes(step) // 2, dtype=np.uint16)
        store.read(entry, step, Span(0, 3), halves.data)
        assert halves.tobytes() == content(A, path_of("abc"), step)
        assert num_right(store, A, "abc") == 3, "a wrong request dropped the entry"


def test_e_is_written_beside_its_kv_and_costs_its_own_bytes(tmp_path):
    e_bytes = page_bytes(Step(Kind.E, 0))
    with open_store(tmp_path) as store:
        assert not store.write(change_of(A, path_of("ab"), None, Part(0)), views_of(A, [])), "no KV"
        assert write(store, A, "abcdefgh", e_layers=[1])
        assert write(store, A, "abcxyz", start=3, e_layers=[1])
        assert write(store, A, "abcdefghij", start=8)
        before = store.status().counts.num_written_bytes
        assert write(store, A, "abcde", e_layers=[0])
        written = store.status().counts.num_written_bytes - before
        assert 5 * e_bytes <= written < 5 * (e_bytes + 26) + 120, "KV was written again"
        before = files_bytes(tmp_path)
        for text, e_layers in (("abcdefgh", []), ("abcde", [0, 1]), ("abc", [1])):
            assert write(store, A, text, e_layers=e_layers)
        assert files_bytes(tmp_path) == before, "it adds nothing"
        assert write(store, A, "abcdefghijk", e_layers=[0, 1])
    with open_store(tmp_path) as store:
        for part in (KV, Part(0), Part(1)):
            assert num_right(store, A, "abcdefghijk", part) == 11
        assert [num_right(store, A, "abcxyz", Part(layer)) for layer in (0, 1)] == [3, 6]
        assert store.status().num_pages == 14
        assert store.status().counts.num_damaged_entries == 0
        store.evict(None, [])
        assert store.status().num_entries == store.status().num_pages == 0
    with open_store(tmp_path) as store:
        assert store.status().num_pages == 0


def test_e_leaves_the_disk_with_its_kv_or_before_it(tmp_path):
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert write(store, A, "s" * 10, e_layers=[1])
        seen = []
        for number in range(120):
            assert write(store, B, text_of(number, 1))
            records = (it.record for it in store.files.coldest_first())
            seen.append({it.part for it in records if it.model == A})
        assert seen[0] == {KV, Part(1)} and seen[-1] == set()
        assert {Part(1)} not in seen
        assert write(store, A, "abc", e_layers=[1])
        for number in range(120):
            assert write(store, B, text_of(number, 1))
            assert num_right(store, A, "abc", Part(1)) == num_right(store, A, "abc") == 3


def test_entry_published_twice_is_one_file(tmp_path):
    """The same entry has the same file names in every folder, so files of a copied folder replace
    each other."""
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        with open_store(path) as store:
            assert write(store, A, "abc", e_layers=[1])
    names = {it.name for it in data_files(one)}
    assert names == {it.name for it in data_files(other)} and len(names) == 2
    for file in data_files(other):
        (one / file.name).write_bytes(file.read_bytes())
    with open_store(one) as store:
        assert [num_right(store, A, "abc", part) for part in (KV, Part(1))] == [3, 3]
        assert store.status().num_bytes == files_bytes(one)
