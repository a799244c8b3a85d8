"""The disk store, one situation at a time: what is found again, what is refused, what goes."""

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
from cachetree.disk import DiskEntry, DiskStore, entry_file
from cachetree.errors import StaleEntry
from cachetree.ids import Kind, Span, Step, entry_steps
from cachetree.tree import Change


def only(store: DiskStore, text: str) -> DiskEntry:
    ((entry, _),) = store.index.find(A, path_of(text))
    return entry


def test_what_is_written_is_read_and_found_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert write(store, A, "abcdef", e_layers=[2, 0], num_runs=3)
        assert write(store, A, "abcxyz", start=3)
        assert write(store, B, "abx", e_layers=[1])
        for _ in range(2):
            assert [num_right(store, A, it) for it in ("abcdef", "abcxyzq", "abq")] == [6, 6, 2]
            assert num_right(store, B, "abcdef") == 2
    with open_store(tmp_path) as again:
        assert [num_right(again, A, it) for it in ("abcdef", "abcxyzq", "abq")] == [6, 6, 2]
        assert num_right(again, B, "abx") == 3
        assert again.status().num_entries == 3
        assert again.status().num_pages == 12
        entry = only(again, "abcdef")
        assert entry.record.layout.e_layers == (0, 2)
        assert write(again, A, "abcxyzq", start=6)
        assert num_right(again, A, "abcxyzq") == 7


@pytest.mark.parametrize("span", [Span(0, 6), Span(0, 1), Span(5, 6), Span(2, 4), Span(3, 3)])
def test_some_pages_of_one_layer_are_read_alone(tmp_path: Path, span: Span) -> None:
    with open_store(tmp_path) as store:
        write(store, A, "abcdef", e_layers=[1])
        check(store, only(store, "abcdef"), span)


def test_a_read_of_some_pages_verifies_its_own_bytes_only(tmp_path: Path) -> None:
    """Pages of KV of 128 KiB, of which two are read at once, and smaller ones of E."""
    family = Family(**(msgspec.structs.asdict(FAMILY) | {"head_dim": 1024, "page_size": 32}))
    steps = entry_steps(family.num_layers, (0, 2))
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
        store.read(only(store, "abcdefg"), step, span, into)
        assert [into] == views(step, span)

    with open_store(tmp_path, 1 << 30, family) as store:
        assert store.write(change_of(A, pages, None, (0, 2)), views)
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
        assert store.index.find(A, pages) == []
        assert store.status().counts.num_damaged_entries == 1


def test_leading_pages_that_are_there_are_skipped(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
        before = files_bytes(tmp_path)
        assert write(store, A, "abc")
        assert files_bytes(tmp_path) == before
        assert write(store, A, "abcde")
        assert [span for _, span in store.index.find(A, path_of("abcde"))] == [
            Span(0, 3),
            Span(0, 2),
        ]
        assert num_right(store, A, "abcde") == 5


def test_pages_after_a_missing_parent_or_in_contradiction_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, B, "abcde")
        assert not write(store, A, "abcde", start=3)
        pages = path_of("ab")
        twice = [pages[0], pages[1], pages[0]]
        assert not store.write(change_of(A, twice), views_of(A, twice))
        assert write(store, A, "abc")
        above_itself = [*path_of("abcd")[3:], pages[0]]
        for looped in (pages[:1], above_itself):
            assert not store.write(
                change_of(A, looped, path_of("abc")[2], [0]), views_of(A, looped)
            )
        jumped = [*path_of("xy"), *path_of("a")]
        assert not store.write(change_of(A, jumped), views_of(A, jumped))
        with pytest.raises(ValueError, match=r"has 4 bytes where 64 belong"):
            store.write(change_of(A, path_of("wxyz")), lambda step, span: [memoryview(b"1234")])
        assert num_right(store, A, "wxyz") == 0
        assert write(store, A, "wxyz")
    with open_store(tmp_path) as store:
        assert [num_right(store, A, it) for it in ("abc", "wxyz", "xy")] == [3, 4, 0]


def test_bytes_that_are_taken_away_during_the_write_never_count(tmp_path: Path) -> None:
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


def test_large_entries_are_cut_into_parts(tmp_path: Path) -> None:
    text = "a" * 500
    with open_store(tmp_path, num_bytes=128 << 10) as store:
        assert write(store, A, text, e_layers=[0, 1, 2], num_runs=7)
        assert num_right(store, A, text) == 500
        assert store.status().num_entries > 4
        assert max(it.stat().st_size for it in data_files(tmp_path)) < (16 << 10) + 300
    with open_store(tmp_path, num_bytes=128 << 10) as store:
        assert num_right(store, A, text) == 500


def test_pages_that_all_lie_apart_are_written_too(tmp_path: Path) -> None:
    num = 2048
    with open_store(tmp_path, num_bytes=16 << 20) as store:
        assert write(store, A, "a" * num, e_layers=[1], num_runs=num)
        assert num_right(store, A, "a" * num) == num
        assert store.status().num_entries == 1


def test_what_is_removed_stays_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, A, "ab")
        write(store, A, "abcd", start=2)
        write(store, A, "abx", start=2)
        write(store, B, "ab")
        entry = store.index.find(A, path_of("abcd"))[1][0]
        assert store.evict(A, path_of("abc"))
        assert not store.evict(A, path_of("abc"))
        with pytest.raises(StaleEntry, match="no longer on disk"):
            check(store, entry)
        assert [num_right(store, A, it) for it in ("abcd", "abx")] == [2, 3]
        assert store.evict(A, path_of("a")), "with all that stands on it"
        assert num_right(store, A, "abx") == 0
    with open_store(tmp_path) as store:
        assert num_right(store, A, "abx") == 0
        assert num_right(store, B, "ab") == 2
        assert store.status().counts.num_damaged_entries == 0
        assert write(store, A, "abx")
        assert num_right(store, A, "abx") == 3


def test_the_least_recently_used_goes_first_and_parents_outlive_children(tmp_path: Path) -> None:
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
        kept = [n for n in range(200) if num_right(store, A, text_of(n, 8)) == 8]
        assert kept == list(range(kept[0], 200)), "not the oldest went"
        num_pages = status.num_pages
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert num_right(store, A, "s" * 10 + "used") == 14
        assert store.status().num_pages == num_pages
        assert [n for n in range(200) if num_right(store, A, text_of(n, 8)) == 8] == kept


def test_what_new_pages_come_after_does_not_make_room_for_them(tmp_path: Path) -> None:
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


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    with open_store(tmp_path, num_bytes=64 << 10) as store:
        for number in range(200):
            write(store, A, f"{number:03}" + "f" * 5)
    assert files_bytes(tmp_path) > 16 << 10
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        assert files_bytes(tmp_path) <= 16 << 10
        assert store.status().num_bytes == files_bytes(tmp_path)
        assert num_right(store, A, "199fffff") == 8
        assert write(store, A, "new")


def test_what_is_larger_than_the_budget_makes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        write(store, A, "kept")
        monkeypatch.setattr(store, "_budget_bytes", 100)
        write(store, A, "new")
        assert (num_right(store, A, "kept"), num_right(store, A, "new")) == (4, 0)


def test_the_listener_hears_of_all_that_comes_and_goes(tmp_path: Path) -> None:
    heard: list[Change] = []

    def there() -> set[object]:
        pages: set[object] = set()
        for change in heard:
            assert change.parent is None or (change.model, change.parent) in pages
            (pages.update if change.added else pages.difference_update)(
                (change.model, page) for page in change.pages
            )
        return pages

    with Opened(FAMILY, tmp_path, 8 << 10, heard.append) as store:
        for number in range(60):
            write(store, A, f"{number % 7}" + "f" * (number % 11 + 1))
        assert len(there()) == store.status().num_pages
        assert any(not change.added for change in heard)
    before = there()
    heard.clear()
    with Opened(FAMILY, tmp_path, 8 << 10, heard.append):
        assert there() == before


def test_after_close_reads_miss_and_writes_fail(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, A, "abc")
    entry = only(store, "abc")
    store.close()
    store.close()
    with pytest.raises(StaleEntry):
        check(store, entry)
    assert not write(store, A, "xyz")


def test_reads_beside_writes_and_evictions_are_right_or_miss(tmp_path: Path) -> None:
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
        for _ in range(1500):
            write(store, A, f"{rng.integers(60):03}" + "f" * int(rng.integers(10)))
            assert store.status().num_bytes <= 24 << 10
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
def test_what_goes_during_a_read_is_right_or_a_miss_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
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
        assert num_right(store, A, "first") == 0
        assert store.status().counts.num_damaged_entries == 0
        assert store.status().num_bytes == files_bytes(tmp_path)


def test_a_read_into_the_wrong_room_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, A, "abc", e_layers=[1])
        entry = only(store, "abc")
        step = Step(Kind.KV, 0)
        with pytest.raises(ValueError, match="bytes do not go into 5"):
            store.read(entry, step, Span(0, 3), memoryview(bytearray(5)))
        with pytest.raises(ValueError, match="exceeds the 3 pages"):
            store.read(entry, step, Span(0, 4), memoryview(bytearray(4 * page_bytes(step))))
        with pytest.raises(StaleEntry, match="without E of layer 2"):
            store.read(entry, Step(Kind.E, 2), Span(0, 3), memoryview(bytearray(48)))
        halves = np.zeros(3 * page_bytes(step) // 2, dtype=np.uint16)
        store.read(entry, step, Span(0, 3), halves.data)
        assert halves.tobytes() == content(A, path_of("abc"), step)
        assert num_right(store, A, "abc") == 3, "a wrong request dropped the entry"


def e_found(store: DiskStore, text: str) -> list[tuple[int, ...]]:
    """Of each page that is found, where it has E."""
    found = store.index.find(A, path_of(text))
    for entry, span in found:
        check(store, entry, span)
    return [entry.record.layout.e_layers for entry, span in found for _ in range(len(span))]


def test_pages_that_are_written_again_with_more_e_have_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert write(store, A, "abcdefgh", e_layers=[1])
        assert write(store, A, "abcxyz", start=3, e_layers=[1])
        assert write(store, A, "abcdefghij", start=8)
        assert write(store, A, "abcde", e_layers=[0, 1])
        # Of an entry that goes on, the rest stays as it was, and what stands on it.
        assert e_found(store, "abcdefghij") == [(0, 1)] * 5 + [(1,)] * 3 + [()] * 2
        assert e_found(store, "abcxyz") == [(0, 1)] * 3 + [(1,)] * 3
        before = files_bytes(tmp_path)
        for text, e_layers in (
            ("abcdefgh", []),
            ("abcdefgh", [2]),
            ("abcde", [0, 1]),
            ("abc", [1]),
        ):
            assert write(store, A, text, e_layers=e_layers)
        assert files_bytes(tmp_path) == before, "it adds nothing, or loses something"
        assert write(store, A, "abcdefghijk", e_layers=[0, 1])
        assert e_found(store, "abcdefghijk") == [(0, 1)] * 11
        assert e_found(store, "abcxyz") == [(0, 1)] * 3 + [(1,)] * 3
        assert store.status().num_pages == 14
    with open_store(tmp_path) as store:
        assert e_found(store, "abcdefghijk") == [(0, 1)] * 11
        assert e_found(store, "abcxyz") == [(0, 1)] * 3 + [(1,)] * 3
        assert store.status().counts.num_damaged_entries == 0
        store.evict(None, [])
        assert store.status().num_entries == store.status().num_pages == 0
    with open_store(tmp_path) as store:
        assert store.status().num_pages == 0


def test_pages_with_e_elsewhere_keep_it_and_gain_none_until_they_are_evicted(
    tmp_path: Path,
) -> None:
    """Whoever writes them has no E to put beside the new: either would be lost."""
    with open_store(tmp_path) as store:
        assert write(store, A, "abc", e_layers=[0, 1])
        assert write(store, A, "abcd", e_layers=[1, 2])
        assert e_found(store, "abcd") == [(0, 1)] * 3 + [(1, 2)]
    with open_store(tmp_path) as store:
        assert write(store, A, "abcd", e_layers=[1, 2])
        assert e_found(store, "abcd") == [(0, 1)] * 3 + [(1, 2)]
        assert store.evict(A, path_of("abcd"))
        assert write(store, A, "abcd", e_layers=[1, 2])
        assert e_found(store, "abcd") == [(1, 2)] * 4
