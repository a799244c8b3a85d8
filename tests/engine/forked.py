"""Servers that start as forks of one process, which has imported SGLang for all of them.

Imports take nearly all of a small server's start. Each of these servers runs the same code as
`python -m sglang.launch_server`, in a session of its own. Only `test_startup` and the tests of the
demo's signals start the command itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sglang_droidspeak.fleet import servers

MODULE = "sglang.launch_server"
BEFORE = "FORKED_BEFORE"
"""Variable with the path of a script that breaks something in the server that runs it."""
_ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SGLANG_TORCH_CPU_START": "fork"}
"""Environment that imports read. It is the same for every server here."""


class ServerSpec(servers.ServerSpec):
    def start(self, folder: Path, env: Mapping[str, str]) -> servers.Server:
        return Server(self, folder, env)


class Server(servers.Server):
    def _launch(self, command: Sequence[str], log: BinaryIO, env: Mapping[str, str]) -> _Fork:
        interpreter, _, module, *arguments = command
        assert (interpreter, module) == (sys.executable, MODULE)
        assert env.items() >= _ENV.items()
        return _Fork(_origin(), arguments, log, env)


class _Fork:
    """Part of `subprocess.Popen` that a server's owner needs, for a process that is not a child."""

    def __init__(self, origin, arguments, log, env):
        call = {"arguments": arguments, "env": dict(env), "folder": str(Path.cwd())}
        self._origin = origin
        self.pid = origin.call(call, log.fileno())
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
        return ended

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], timeout_s)[0]:
            self.returncode = self._origin.call({"ended": self.pid})
            os.close(self._descriptor)
        return self.returncode


class _Origin:
    """The process that all servers are forks of. It ends with this process."""

    def __init__(self) -> None:
        self._calls, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENV},
                start_new_session=True,
            )
        self._lines = self._calls.makefile("r")
        self._lock = threading.Lock()
        atexit.register(self._close)

    def call(self, call: Mapping[str, Any], *descriptors: int) -> int:
        line = json.dumps(call).encode() + b"\n"
        with self._lock:
            # A descriptor arrives with the first byte, and a call is longer than that.
            sent = socket.send_fds(self._calls, [line], descriptors)
            self._calls.sendall(line[sent:])
            return int(self._lines.readline())

    def _close(self) -> None:
        self._calls.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@functools.cache
def _origin() -> _Origin:
    return _Origin()


def _import_all() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()  # Before the scheduler is imported, as in a server's own first process.
    from sglang.srt.entrypoints import http_server  # noqa: F401
    from sglang.srt.managers import scheduler  # noqa: F401
    from sglang.srt.models.registry import import_model_classes

    import_model_classes("sglang.srt.models")
    gc.collect()
    gc.freeze()


def _receive(calls: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next call and its descriptors, or nothing at the end."""
    line, descriptors, _, _ = socket.recv_fds(calls, 1 << 16, 1)
    while line and not line.endswith(b"\n"):
        line += calls.recv(1 << 16)
    return json.loads(line or "{}"), descriptors


def _serve(calls: socket.socket) -> None:
    """Fork a child for each call that arrives. Return only in the child: the parent waits for
    calls."""
    while call := (received := _receive(calls))[0]:
        if "ended" in call:
            _, status = os.waitpid(call["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif answer := os.fork():
            os.close(received[1][0])
        else:
            calls.close()
            _become(call, received[1][0])
            return
        calls.sendall(b"%d\n" % answer)
    os._exit(0)


def _become(call: Mapping[str, Any], log: int) -> None:
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["env"])
    if BEFORE in os.environ:
        runpy.run_path(os.environ[BEFORE], run_name="__main__")
    sys.argv = [MODULE, *call["arguments"]]


if __name__ == "__main__":
    _import_all()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
