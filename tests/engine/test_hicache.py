"""Caches that share only a HiCache backend: pages that are found again, and possible faults."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hicache_parts import (
    Counts,
    PointerStore,
    Shelf,
    cache_over,
    fetch,
    num_there,
    num_with_e,
    objects_of,
    open_cache,
    search,
    store_and_wait,
    store_without_e,
)
from kept_parts import PAGE_TOTAL
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from tier_parts import prompt
from transport_parts import E_LAYER, FAMILY, MODEL, eventually, pages_of, store

from cachetree import (
    KV,
    LOCAL,
    Cache,
    CacheConfig,
    ConfigError,
    Kind,
    PageHash,
    Part,
    Span,
    StaleEntry,
    Step,
)
from cachetree.tree.remote_entries import RemoteEntries
from sglang_droidspeak.engine.hicache import check_backend
from sglang_droidspeak.hicache import HICACHE, Objects, hicache_tier, tier
from sglang_droidspeak.hicache.lane import AbsentPages, Piece

NUM_OBJECTS = 8 * 5
"""Number of objects of a prompt of eight pages: KV of four layers, and E of one."""


@pytest.fixture(autouse=True)
def no_directory_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches wait without a limit. Another file tests late searches."""
    monkeypatch.setattr(tier, "WAIT_S", 10.0)


# The file backend.


def test_what_one_cache_stores_another_one_finds_and_reads(tmp_path):
    with open_cache(tmp_path) as sender, open_cache(tmp_path) as receiver:
        assert search(receiver, prompt(0)) == 0
        for number in range(1, 4):
            store_and_wait(sender, prompt(number))
        assert objects_of(sender) == {"written": 3 * NUM_OBJECTS}
        assert len(list(tmp_path.glob("*.bin"))) == 3 * NUM_OBJECTS
        assert receiver.match(prompt(1)) == []
        assert search(receiver, prompt(1)) == 8
        (match,) = receiver.match(prompt(1))
        assert (match.model, match.location, match.e_pages) == (MODEL, HICACHE, {E_LAYER: 8})
        for span in (Span(0, 8), Span(2, 5), Span(7, 8)):
            fetch(receiver, prompt(1), span)
        # E of one layer and KV of the three that the plan loads; the other is not read.
        assert objects_of(receiver) == {"read": (8 + 3 + 1) * 4}
        assert not receiver.search(prompt(1)), "asked although the tree knows"


def test_a_restart_finds_its_own_again_also_after_eviction(tmp_path):
    with open_cache(tmp_path, host_bytes=2 * NUM_OBJECTS * FAMILY.kv_page_bytes) as cache:
        for number in range(6):
            store_and_wait(cache, prompt(number))
        assert not any(it.location == LOCAL for it in cache.match(prompt(0)))
        fetch(cache, prompt(0), Span(0, 8))
    with open_cache(tmp_path) as cache:
        assert search(cache, prompt(3)) == 8
        fetch(cache, prompt(3), Span(0, 8))


def test_closing_writes_what_waits(tmp_path):
    with open_cache(tmp_path) as cache:
        for number in range(4):
            store(cache.tree, prompt(number))
    with open_cache(tmp_path) as cache:
        assert [search(cache, prompt(number)) for number in range(4)] == [8] * 4


def test_what_is_written_behind_is_not_used_by_it():
    may_write = threading.Event()
    shelf = Shelf(lambda call: call != "write" or may_write.wait(10))
    with cache_over(shelf, host_bytes=3 * 8 * PAGE_TOTAL) as cache:
        for number in range(3):
            store(cache.tree, prompt(number))
        cache.match(prompt(1))  # 2 is now the older one, and the last that is written.
        may_write.set()
        eventually(lambda: objects_of(cache) == {"written": 3 * NUM_OBJECTS})
        eventually(lambda: not cache.tree.held_bytes)
        for number in range(3, 5):
            store(cache.tree, prompt(number))
        numbers = [number for number in range(5) if cache.tree.has(MODEL, prompt(number)[-1])]
        assert numbers == [1, 3, 4]


def test_a_long_prompt_that_grows(tmp_path):
    pages = prompt(0, 300)
    with open_cache(tmp_path) as sender, open_cache(tmp_path) as receiver:
        store_and_wait(sender, pages[:200])
        assert search(receiver, pages[:200]) == 200
        with open_cache(tmp_path) as early:
            assert search(early, pages) == 200
        store_and_wait(sender, pages[200:], pages[199])
        eventually(lambda: num_with_e(sender, pages) == 300)
        assert search(receiver, pages) == 300
        (match,) = receiver.match(pages)
        assert match.e_pages == {E_LAYER: 300}
        fetch(receiver, pages, Span(0, 300))
        eventually(lambda: objects_of(receiver) == {"read": 1200})


def test_another_family_finds_nothing(tmp_path):
    other = msgspec.structs.replace(FAMILY, tokenizer="other")
    with open_cache(tmp_path) as sender, open_cache(tmp_path, other) as receiver:
        store_and_wait(sender, prompt(0))
        assert search(receiver, prompt(0)) == 0


def test_one_of_two_equal_servers_writes(tmp_path):
    with open_cache(tmp_path) as first:
        store_and_wait(first, prompt(0))
    with open_cache(tmp_path) as second:
        store(second.tree, prompt(0))
        eventually(lambda: num_there(second, prompt(0)) == 8)
        assert objects_of(second) == {}


def file_of(folder: Path, page: PageHash, step: Step) -> Path:
    (file,) = folder.glob(f"{Objects(FAMILY).key(MODEL, page, step)}*")
    return file


def truncate(file: Path, _other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path, _other: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path, _other: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)


def replace(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


def remove(file: Path, _other: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("harm", "counted"),
    [
        (truncate, "damaged"),
        (empty, "damaged"),
        (flip, "damaged"),
        (replace, "damaged"),
        (remove, "missing"),
    ],
)
@pytest.mark.parametrize("page", [0, 5])
def test_what_is_wrong_is_a_miss(tmp_path, harm, counted, page):
    pages = prompt(0)
    step = Step(Kind.KV, 1)
    with open_cache(tmp_path) as sender:
        store_and_wait(sender, pages)
        store_and_wait(sender, prompt(1))
    harm(file_of(tmp_path, pages[page], step), file_of(tmp_path, pages[page - 1], step))
    with open_cache(tmp_path) as receiver:
        assert search(receiver, pages) == 8
        with pytest.raises(StaleEntry):
            fetch(receiver, pages, Span(0, 8))
        assert objects_of(receiver)[counted] == 1
        eventually(lambda: num_there(receiver, pages) == page)
        assert search(receiver, pages) == page, "found again what is known to be wrong"
        if page:
            fetch(receiver, pages, Span(0, page))
        assert search(receiver, prompt(1)) == 8
        fetch(receiver, prompt(1), Span(0, 8))
        assert receiver.status().staging_bytes_in_use == 0


def test_who_reads_is_told_before_all_that_is_lost_with_it_is_forgotten(tmp_path, monkeypatch):
    """The notes of all lost pages may take long to go, and the fetch does not wait for that."""
    pages, may_forget = prompt(0), threading.Event()
    forget = RemoteEntries.drop_in_slices

    def slowly(self: RemoteEntries, *what: Any) -> None:
        assert may_forget.wait(10)
        forget(self, *what)

    monkeypatch.setattr(RemoteEntries, "drop_in_slices", slowly)
    with open_cache(tmp_path) as sender:
        store_and_wait(sender, pages)
    file_of(tmp_path, pages[5], Step(Kind.KV, 1)).unlink()
    with open_cache(tmp_path) as receiver:
        assert search(receiver, pages) == 8
        with pytest.raises(StaleEntry):
            fetch(receiver, pages, Span(0, 8))
        assert num_there(receiver, pages) == 8
        may_forget.set()
        eventually(lambda: num_there(receiver, pages) == 5)


def test_every_single_bit_counts():
    small = msgspec.structs.replace(FAMILY, page_size=1, head_dim=4, hidden_size=16)
    objects, page = Objects(small), pages_of(1)[0]
    step = Step(Kind.KV, 0)
    memory = memoryview(bytearray(objects.size(step)))
    piece = Piece(0, step, objects.key(MODEL, page, step), 0, memory)
    payload = bytes(range(objects.page_bytes(step)))
    piece.seal(memoryview(payload))
    assert piece.opened() == payload
    assert dataclasses.replace(piece, key=piece.key + "0").opened() is None
    for bit in range(8 * objects.size(step)):
        memory[bit // 8] ^= 1 << bit % 8
        assert piece.opened() is None, bit
        memory[bit // 8] ^= 1 << bit % 8
    assert piece.opened() == payload


def test_e_that_is_missing_is_written_and_kv_is_not_written_twice(tmp_path):
    pages = prompt(0)
    with open_cache(tmp_path) as first:
        store_without_e(first, pages)
        eventually(lambda: num_there(first, pages) == 8)
    with open_cache(tmp_path) as second:
        assert search(second, pages) == 8
        (match,) = second.match(pages)
        assert match.e_pages == {}
        store(second.tree, pages)
        eventually(lambda: objects_of(second) == {"written": 8})
    with open_cache(tmp_path) as third:
        assert search(third, pages) == 8
        assert third.match(pages)[0].e_pages == {E_LAYER: 8}


@pytest.mark.parametrize("num_known", [0, 8])
@pytest.mark.parametrize("num_loaded", [8, 12])
def test_what_is_loaded_without_e_hides_none_that_is_there(num_loaded, num_known):
    """Pages are stored as a server stores its own."""
    shelf, pages = Shelf(), prompt(0, 12)
    with cache_over(shelf) as sender:
        store_and_wait(sender, pages[:8])
    with cache_over(shelf) as receiver:
        assert search(receiver, pages[:num_known]) == num_known
        store_without_e(receiver, pages[:num_loaded])
        store_and_wait(receiver, prompt(1))  # And before it what came before.
        assert search(receiver, pages) == num_loaded
        assert num_with_e(receiver, pages) == 8


@pytest.mark.parametrize("lost_layer", [0, FAMILY.num_layers - 1])
def test_pages_that_are_not_whole_are_not_found_and_are_written_again(tmp_path, lost_layer):
    """A backend that drops its oldest objects drops the first written page first. In a crash, the
    last one is lost."""
    pages = prompt(0)
    with open_cache(tmp_path) as first:
        store_and_wait(first, pages)
    for page in pages[3:]:
        file_of(tmp_path, page, Step(Kind.KV, lost_layer)).unlink()
    with open_cache(tmp_path) as second:
        assert search(second, pages) == 3
        store(second.tree, pages)
        eventually(lambda: num_there(second, pages) == 8)
    with open_cache(tmp_path) as third:
        assert search(third, pages) == 8
        fetch(third, pages, Span(0, 8))


# Backends that move memory by its address.


def test_a_backend_that_uses_the_host_pool(monkeypatch):
    monkeypatch.setattr(PointerStore, "objects", {})
    config = {
        "backend_name": "pointers",
        "module_path": PointerStore.__module__,
        "class_name": PointerStore.__name__,
    }
    tiers = [hicache_tier("dynamic", config, {MODEL: (E_LAYER,)}, Counts())]
    with Cache(FAMILY, CacheConfig(serves=False), tiers=tiers) as sender:
        store_and_wait(sender, prompt(0, 100))
    assert len(PointerStore.objects) == 2 * 500
    with Cache(FAMILY, CacheConfig(serves=False), tiers=tiers) as receiver:
        assert search(receiver, prompt(0, 100)) == 100
        fetch(receiver, prompt(0, 100), Span(0, 100))
        PointerStore.objects.popitem()
        with pytest.raises(StaleEntry):
            fetch(receiver, prompt(0, 100), Span(0, 100))


# Searches.


def test_one_question_per_model_and_layer_then_none():
    shelf = Shelf()
    with cache_over(shelf) as sender:
        store_and_wait(sender, prompt(0))
    shelf.calls.clear()
    with cache_over(shelf) as receiver:
        assert search(receiver, prompt(0)) == 8
        assert shelf.calls == [("exists", 8)] * 3, "two marks of whole pages, and E"
        assert search(receiver, prompt(1)) == 0
        assert shelf.calls[3:] == [("exists", 8)]
        assert not receiver.search(prompt(1)), "asked again for what was just absent"
        assert len(shelf.calls) == 4
    assert shelf.is_closed


def test_e_that_comes_later_is_found_too(monkeypatch):
    shelf, pages = Shelf(), prompt(0)
    monkeypatch.setattr(tier, "ABSENT_S", 0.0)
    with cache_over(shelf) as sender, cache_over(shelf) as receiver:
        store_without_e(sender, pages)
        eventually(lambda: num_there(sender, pages) == 8)
        assert search(receiver, pages) == 8
        assert num_with_e(receiver, pages) == 0
        store_and_wait(sender, pages)
        shelf.calls.clear()
        assert search(receiver, pages) == 8
        assert num_with_e(receiver, pages) == 8
        assert shelf.calls == [("exists", 8)]


def test_absence_is_believed_for_a_while():
    now = [0.0]
    absent = AbsentPages(lambda: now[0])
    (page,) = pages_of(1)
    absent.add(MODEL, KV, page, 5.0)
    assert absent.has(MODEL, KV, page)
    assert not absent.has(MODEL, Part(E_LAYER), page)
    now[0] = 5.0
    assert not absent.has(MODEL, KV, page)


def test_the_tree_shows_no_more_than_a_bound(monkeypatch):
    monkeypatch.setattr(tier, "MAX_KNOWN_PAGES", 2 * 20)
    with cache_over(Shelf()) as cache:
        for number in range(3):
            store_and_wait(cache, prompt(number))
        assert [num_there(cache, prompt(number)) for number in range(3)] == [0, 8, 8]
        assert search(cache, prompt(0)) == 8


# Settings.


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("florp", {}, "hicache_backend is 'florp'; SGLang has .*file.*nixl.* and dynamic"),
        ("sim", {}, "keeps no bytes"),
        ("dynamic", {"backend_name": "x"}, "has no module_path, class_name"),
        ("aibrix", {}, "cannot be loaded"),
    ],
)
def test_a_backend_that_cannot_work_is_refused(name, config, named):
    with pytest.raises(ConfigError, match=named):
        check_backend(name, config)


def test_the_folder_of_the_file_backend_is_this_users_alone(tmp_path, monkeypatch):
    """SGLang's own folder belongs to the user who first made it, and all users can read it. Here a
    folder has to be named."""
    with pytest.raises(ConfigError, match="file_storage_path is None; name a folder"):
        check_backend("file", {})
    folder = tmp_path / "a" / "store"
    config = {"file_storage_path": str(folder)}
    check_backend("file", config)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in ("755", "710", "702"):
        folder.chmod(int(mode, 8))
        with pytest.raises(ConfigError, match=f"store', which has mode {mode} .* with mode 700"):
            check_backend("file", config)
    folder.chmod(0o700)
    check_backend("file", config)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "other"))
    folder.chmod(0o755)
    check_backend("file", config)
    check_backend("file", {})
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o700
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"is of user {user}, and this is user {user + 1}; name"):
        check_backend("file", {})


@pytest.mark.parametrize("config", [{}, {"plugin": {"gds": {"active": True}}}], ids=["auto", "gds"])
def test_the_folders_of_nixl_are_this_users_alone(tmp_path, monkeypatch, config):
    """SGLang's default for files is a folder that all users may read."""
    monkeypatch.setitem(StorageBackendFactory._registry["nixl"], "loader", lambda: None)
    check_backend("nixl", {"plugin": {"obj": {"active": True}}})
    variable = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
    with pytest.raises(ConfigError, match=f"{variable} is ''; name a folder"):
        check_backend("nixl", config)
    folders = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setenv(variable, ", ".join(map(str, folders)))
    check_backend("nixl", config)
    assert {it.stat().st_mode & 0o777 for it in folders} == {0o700}
    folders[1].chmod(0o755)
    with pytest.raises(ConfigError, match=f"{variable} is '.*/b', which has mode 755"):
        check_backend("nixl", config)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = {"file_storage_path": str(tmp_path / "file" / "x")}
    with pytest.raises(ConfigError, match=r"file_storage_path is '.*/x': Not a directory; name"):
        check_backend("file", config)


def test_a_backend_that_cannot_be_made_stops_the_start(tmp_path):
    config = {
        "file_storage_path": str(tmp_path),
        "enable_metadata_cache": True,
        "metadata_ttl": "long",
        "password": "secret",
    }
    tiers = [hicache_tier("file", config, {}, Counts())]
    with pytest.raises(
        ConfigError, match=r"made with \w+ \(it has file_storage_path, .*, password\)"
    ) as raised:
        Cache(FAMILY, CacheConfig(serves=False), tiers=tiers)
    assert "secret" not in str(raised.value), "it may be a credential"


def test_a_closed_cache_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    with open_cache(tmp_path) as cache:
        store_and_wait(cache, prompt(0))
    assert not {it.name for it in set(threading.enumerate()) - before if "hicache" in it.name}
    cache.close()
