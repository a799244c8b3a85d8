"""The disk store without room or descriptors: it writes nothing in part, and misses."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_parts import (
    A,
    B,
    check,
    data_files,
    files_bytes,
    num_right,
    open_store,
    path_of,
    text_of,
    write,
)

from cachetree.errors import ConfigError, StaleEntry

PARTS = Path(__file__).with_name("disk_parts.py")


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """Set a limit of this process. Python ignores the signal of a limit on the size of files."""
    before, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, hard))


def test_a_write_that_fails_at_any_byte_leaves_nothing_behind(tmp_path):
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
        before = files_bytes(tmp_path)
        for limit in range(2000):
            with limited(resource.RLIMIT_FSIZE, limit):
                if write(store, A, "abcde"):
                    break
            assert files_bytes(tmp_path) == before
            assert num_right(store, A, "abcde") == 3
            assert store.status().num_bytes == files_bytes(tmp_path)
            assert store.status().counts.num_failed_writes == limit + 1
        assert 100 < limit < 1999
        assert num_right(store, A, "abcde") == 5
    with open_store(tmp_path) as store:
        assert num_right(store, A, "abcde") == 5
        assert store.status().counts.num_damaged_entries == 0


def test_a_new_file_that_cannot_be_begun_is_tried_again(tmp_path, caplog):
    with open_store(tmp_path) as store:
        with limited(resource.RLIMIT_FSIZE, 10), caplog.at_level(logging.INFO):
            assert not write(store, A, "abc")
            assert not write(store, A, "abc")
        assert data_files(tmp_path) == []
        assert store.status().num_bytes == files_bytes(tmp_path)
        with caplog.at_level(logging.INFO):
            assert write(store, A, "abc")
        assert [it.message.split(str(tmp_path))[1][:19] for it in caplog.records] == [
            " cannot be written,",
            " can be written aga",
        ]
        assert num_right(store, A, "abc") == 3


def test_a_full_file_system_is_a_miss_and_deletions_still_last(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    command += [sys.executable, str(PARTS), "full", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "full\n"


def test_too_many_open_files_do_not_count_as_damage(tmp_path):
    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
        ((entry, _),) = store.find(A, path_of("abc"))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(StaleEntry, match="open files"):
            check(store, entry)
        assert hard
        assert num_right(store, A, "abc") == 3
        assert store.status().counts.num_damaged_entries == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_entry_that_cannot_be_read_at_start_is_not_removed(tmp_path, monkeypatch, number):
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with open_store(tmp_path) as store:
        assert write(store, A, "abc")
    with monkeypatch.context() as patch:
        patch.setattr("cachetree.disk.entry_file.read_record", fail)
        with pytest.raises(ConfigError, match=f"{os.strerror(number)}; mend that") as refused:
            open_store(tmp_path)
    assert "remove" not in str(refused.value)
    with open_store(tmp_path) as store:
        assert num_right(store, A, "abc") == 3


@pytest.mark.parametrize("what", [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE])
def test_failed_writes_are_counted_and_are_no_damage(tmp_path, what):
    """The budget is used up, so other entries have to be evicted for each write."""
    with open_store(tmp_path, num_bytes=16 << 10) as store:
        texts = [text_of(number, 4) for number in range(100)]
        assert all(write(store, B, text) for text in texts)
        assert store.status().counts.num_evicted_entries > 10
        assert num_right(store, B, texts[-1]) == 4
        for number in range(100, 140):
            before = store.files.coldest_first()
            with limited(what, 0):
                for attempt in range(3):
                    assert not write(store, B, text_of(number, 4)), attempt
            num_gone = len(before) - len(store.files.coldest_first())
            # What is found out before there is room costs nothing; then the room stays.
            assert num_gone <= (0 if what == resource.RLIMIT_NOFILE else 2), number
            assert num_right(store, B, text_of(number - 1, 4)) == 4
            assert write(store, B, text_of(number, 4))
        assert store.status().counts.num_failed_writes == 120
        assert store.status().counts.num_damaged_entries == 0
