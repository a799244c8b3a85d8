"""A cache that cannot start leaves no thread, no descriptor and no lock behind."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from kept_parts import cache_of

from cachetree.transport import Peer


def refuse(*_: object, **__: object) -> object:
    raise OSError(errno.EMFILE, "too many open files")


def refuse_zmq(*_: object, **__: object) -> object:
    raise zmq.ZMQError(errno.EMFILE)


def without_thread(name: str, num_started: int = 0) -> Callable[[threading.Thread], None]:
    """Start `num_started` threads of this name and refuse the next one."""
    start, left = threading.Thread.start, itertools.count(num_started, -1)

    def refuse_thread(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and next(left) == 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    return refuse_thread


def open_and_close(folder: Path) -> None:
    """Open and close every part that has threads or descriptors. No peer answers."""
    disk = {"disk_path": str(folder), "disk_bytes": 16 << 20, "host_bytes": 8 << 20}
    peers = ("tcp://127.0.0.1:9", "dns://127.0.0.1:9")
    with cache_of(**disk, peers=peers):
        pass


def descriptors() -> list[str]:
    gc.collect()
    links = Path("/proc/self/fd").iterdir()
    return sorted(str(it.readlink()) for it in links if it.is_symlink())


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (os, "eventfd", refuse),
        (zmq.Context, "socket", refuse_zmq),
        (select, "epoll", refuse),
        (Peer, "__init__", refuse),
        *(
            (threading.Thread, "start", without_thread(f"cachetree-{thread}"))
            for thread in ("disk-read", "disk-evict", "disk-write", "worker", "peer", "directory")
        ),
        (threading.Thread, "start", without_thread("cachetree-disk-read", 1)),
    ],
)
def test_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, owner, name, fault):
    open_and_close(tmp_path)
    threads, files = set(threading.enumerate()), descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        with pytest.raises((OSError, RuntimeError, zmq.ZMQError)) as failure:
            open_and_close(tmp_path)
    left = set(threading.enumerate()) - threads
    for thread in left:
        thread.join(1.0)
    assert not [it.name for it in left if it.is_alive()]
    assert descriptors() == files, failure  # Its frames hold all that was not closed.
    open_and_close(tmp_path)
