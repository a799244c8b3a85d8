"""Directories that a disk store accepts, those that it refuses, and the times of its files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from disk_parts import (
    FAMILY,
    A,
    data_files,
    file_of,
    files_bytes,
    num_right,
    open_store,
    path_of,
    write,
)

from cachetree.disk.directory import new_file
from cachetree.errors import ConfigError

PARTS = Path(__file__).with_name("disk_parts.py")


def modes_in(path: Path) -> set[int]:
    return {stat.S_IMODE(it.stat().st_mode) for it in path.iterdir()}


def test_others_can_read_neither_files_nor_folders(tmp_path):
    before = os.umask(0)
    try:
        with open_store(tmp_path / "a" / "b") as store:
            write(store, A, "abc")
            assert modes_in(tmp_path) == modes_in(tmp_path / "a") == {0o700}
            assert modes_in(tmp_path / "a" / "b") == {0o600}
    finally:
        os.umask(before)


def test_directory_that_others_could_read_is_closed_to_them(tmp_path):
    with open_store(tmp_path / "own") as store:
        write(store, A, "abc")
    for path in (tmp_path / "own", *(tmp_path / "own").iterdir()):
        path.chmod(0o755)
    with open_store(tmp_path / "own") as store:
        assert num_right(store, A, "abc") == 3
        assert modes_in(tmp_path) == {0o700}
        assert modes_in(tmp_path / "own") == {0o600}
    other = tmp_path / "of others"
    other.mkdir()
    other.chmod(0o755)
    (other / "file").touch(0o644)
    with pytest.raises(ConfigError):
        open_store(other)
    assert stat.S_IMODE(other.stat().st_mode) == 0o755


REMEDY = "name another directory, or remove this one$"


def test_entries_of_another_family_are_refused_by_their_names(tmp_path):
    other = msgspec.structs.replace(FAMILY, kv_dtype="bfloat16")
    open_store(tmp_path).close()
    with open_store(tmp_path, family=other) as store:
        assert write(store, A, "abc")
        (theirs,) = data_files(tmp_path)
        with pytest.raises(ConfigError, match="is using"):
            open_store(tmp_path)
    named = f"{theirs.name} of another family or release, where ours begin with entry-8-[0-9a-f]+-"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{named}; {REMEDY}"):
            open_store(tmp_path)
    with open_store(tmp_path, family=other) as store:
        assert num_right(store, A, "abc") == 3


@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize("release", ["", "7-", "9-"])
def test_entries_of_another_release_are_refused(tmp_path, release, has_lock):
    if has_lock:
        open_store(tmp_path).close()
    theirs = tmp_path / f"entry-{release}{FAMILY.digest[:8]}-000000000001"
    theirs.write_bytes(b"theirs")
    files = sorted(tmp_path.iterdir())
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"holds {theirs.name} of .* release.*; {REMEDY}"):
            open_store(tmp_path)
        assert sorted(tmp_path.iterdir()) == files
    theirs.unlink()
    open_store(tmp_path).close()


def test_unfinished_files_of_dead_processes_are_swept_for_any_owner(tmp_path):
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
    ours = f"entry-8-{FAMILY.digest[:8]}-{'0' * 32}"
    for name in (ours, "entry-6-01234567-000000000009"):
        (tmp_path / f"{name}.new").write_bytes(b"half")
    with open_store(tmp_path) as store:
        assert store.status().counts.num_torn_writes == 2
        assert store.status().num_bytes == files_bytes(tmp_path)
        assert num_right(store, A, "abc") == 3
        assert len(data_files(tmp_path)) == 1


def test_a_directory_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"\(letter\.txt\); name an empty directory$"):
            open_store(tmp_path)
        assert [it.name for it in tmp_path.iterdir()] == ["letter.txt"]
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="disk path is"):
            open_store(path)
    assert (tmp_path / "letter.txt").read_text() == "dear"
    store = open_store(tmp_path / "new" / "one")
    (tmp_path / "new" / "one" / "letter.txt").write_text("dear")
    store.close()
    open_store(tmp_path / "new" / "one").close()
    assert (tmp_path / "new" / "one" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_budget_that_holds_nothing_is_refused(tmp_path, num_bytes):
    with pytest.raises(ConfigError, match=f"disk_bytes is {num_bytes}; .* at least") as refused:
        open_store(tmp_path, num_bytes)
    with open_store(tmp_path, int(str(refused.value).split()[-1])) as store:
        assert write(store, A, "a")


def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_there_emptied(tmp_path):
    other, folder = tmp_path / "other", tmp_path / "disk"
    other.write_text("kept")
    folder.mkdir()
    (folder / "cachetree.lock").symlink_to(other)
    with pytest.raises(ConfigError, match=r"disk path is .*; mend that, or name another"):
        open_store(folder)
    assert other.read_text() == "kept"


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    """Root could write there, and is refused as well: the directory's owner could change the
    files."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"is of user {user}, and this is user {user + 1}; name"):
        open_store(tmp_path)
    assert not list(tmp_path.iterdir())


def test_links_are_neither_written_nor_read_nor_closed_to_others(tmp_path):
    other, folder = tmp_path / "other", tmp_path / "disk"
    other.write_text("kept")
    other.chmod(0o644)
    with open_store(folder) as store:
        assert write(store, A, "abc")
        (first,) = data_files(folder)
        with open_store(tmp_path / "twin") as twin:
            assert write(twin, A, "xyz")
        (second,) = data_files(tmp_path / "twin")
        (folder / f"{second.name}.new").symlink_to(other)
        assert write(store, A, "xyz")
        assert num_right(store, A, "xyz") == 3
    assert other.read_text() == "kept"
    first.rename(tmp_path / "moved")
    first.symlink_to(tmp_path / "moved")
    folder.chmod(0o755)
    with open_store(folder) as store:
        assert num_right(store, A, "abc") == 0
        assert num_right(store, A, "xyz") == 3
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_a_link_that_comes_at_the_last_moment_is_not_followed(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.write_text("kept")
    unlink = Path.unlink

    def replace(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        path.symlink_to(other)

    monkeypatch.setattr(Path, "unlink", replace)
    with pytest.raises(FileExistsError), new_file(tmp_path / "entry"):
        pass
    assert other.read_text() == "kept"


def test_one_process_at_a_time_has_the_directory(tmp_path):
    command = [sys.executable, str(PARTS), "write", str(tmp_path), str(1 << 20), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout
            assert writer.stdout.readline() == "open\n"
            with pytest.raises(ConfigError, match=f"process {writer.pid} is using"):
                open_store(tmp_path)
        finally:
            writer.kill()
    with open_store(tmp_path), pytest.raises(ConfigError, match="is using"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_use_counts_after_a_restart_and_is_noted_once_a_minute(tmp_path):
    with open_store(tmp_path) as store:
        for text in ("abc", "xyz"):
            assert write(store, A, text)
        for age_s, file in enumerate(data_files(tmp_path)):
            os.utime(file, (age_s, age_s))
        used = file_of(tmp_path, A, "abc")
        store.find(A, path_of("abc"))
        assert used.stat().st_mtime > 1
    with open_store(tmp_path) as store:
        assert [it.record.pages[-1] for it in store.files.coldest_first()] == [
            path_of("xyz")[-1],
            path_of("abc")[-1],
        ]
        store.find(A, path_of("abc"))
        os.utime(used, (1, 1))
        store.find(A, path_of("abc"))
        assert used.stat().st_mtime == 1
