"""Run real servers and workers in a context manager, for the demo, fleets, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import requests
import yaml

from sglang_droidspeak.fleet import ServerFailed
from sglang_droidspeak.fleet.client import Client, ask_server
from sglang_droidspeak.fleet.ports import check_port, free_port
from sglang_droidspeak.fleet.signals import terminable, uninterrupted
from sglang_droidspeak.start.config import linker_options

START_TIMEOUT_S = 1800
"""Seconds that a process may take to be ready, by default. Reading a large model takes many
minutes."""
_LOOK_S = 0.1
_SERVING = "serving at "
"""Text that `cachetree serve` writes before its address."""
STOP_TIMEOUT_S = 20.0
"""Seconds before a stopping process is killed. A cache writes its queue to disk for at most ten
seconds, so only a process that hangs takes longer."""
_FORKED_START = {"SGLANG_TORCH_CPU_START": "fork"}
"""Environment variables with which a server on a CPU imports SGLang once for all its processes."""
_LAST_LINES = 30


def end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Specification of a process: its command, and how to see that it is ready."""

    name: str

    def start(self, folder: Path, env: Mapping[str, str]) -> Process:
        return Process(self, folder, env)

    def words(self, folder: Path) -> Sequence[str]:
        """Return the command's words. Writes the files that the command reads into `folder`."""
        raise NotImplementedError

    def address(self, log: Path) -> str:
        """Address at which clients reach the process."""
        raise NotImplementedError

    def answers(self, log: Path) -> bool:
        raise NotImplementedError

    def check(self) -> None:
        """Raise ServerFailed if another process has the port. That process would answer in this
        server's place."""

    def is_on_gpu(self, _env: Mapping[str, str]) -> bool:
        """Whether the process measures a GPU's free memory before and after it loads its model.
        Another process that starts in between would spoil this measurement."""
        return False


@dataclass(frozen=True, kw_only=True)
class ServerSpec(Spec):
    """An SGLang server, started by `python -m sglang.launch_server --config FILE`."""

    model: Path
    name: str = "server"
    droidspeak: Mapping[str, Any] | None = None
    """SGLang's `linker_extra_config`; None starts SGLang without the extension."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own options by their flag names without dashes."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters by their names in requests. SGLang accepts them only as flags."""
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"

    def start(self, folder: Path, env: Mapping[str, str]) -> Server:
        return Server(self, folder, env)

    def words(self, folder: Path) -> Sequence[str]:
        options: dict[str, Any] = {
            "model-path": str(self.model),
            "host": self.host,
            "port": self.port,
            "page-size": 16,
            "skip-server-warmup": True,
            **self.options,
        }
        if self.droidspeak is not None:
            options |= linker_options(self.droidspeak)
        loras = [f"{name}={path}" for name, path in self.adapters.items()]
        flags = ("--enable-lora", "--lora-paths", *loras) if loras else ()
        command = (sys.executable, "-m", "sglang.launch_server", "--config")
        return (*command, _written(folder / f"{self.name}.yaml", options), *flags)

    def address(self, _log: Path) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def answers(self, log: Path) -> bool:
        with contextlib.suppress(requests.RequestException):
            return ask_server("GET", f"{self.address(log)}/ready", timeout=2).status_code == 200
        return False

    def check(self) -> None:
        check_port(self.name, self.host, self.port)

    def is_on_gpu(self, env: Mapping[str, str]) -> bool:
        is_hidden = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES") == ""
        if is_hidden or self.options.get("device") == "cpu":
            return False
        import torch

        return torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(Spec):
    """A worker, started by `cachetree serve --config FILE`."""

    config: Mapping[str, Any]
    name: str = "worker"

    def words(self, folder: Path) -> Sequence[str]:
        command = (sys.executable, "-m", "cachetree.cli", "serve", "--config")
        return (*command, _written(folder / f"{self.name}.yaml", self.config))

    def address(self, log: Path) -> str:
        """Address of the worker, with the real port. Empty until the worker is ready."""
        return log.read_text(errors="replace").partition(_SERVING)[2].partition("\n")[0].strip()

    def answers(self, log: Path) -> bool:
        return bool(self.address(log))


@dataclass(frozen=True, kw_only=True)
class ProgramSpec(Spec):
    """Any other program that servers need, such as a store's master."""

    command: Sequence[str]
    port: int
    """Port on loopback that accepts connections once the program is ready."""
    name: str = "program"

    def words(self, _folder: Path) -> Sequence[str]:
        return self.command

    def address(self, _log: Path) -> str:
        return f"127.0.0.1:{self.port}"

    def answers(self, _log: Path) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def check(self) -> None:
        check_port(self.name, "127.0.0.1", self.port)


def _written(path: Path, options: Mapping[str, Any]) -> str:
    with _new_file(path) as file:
        yaml.safe_dump(dict(options), file, sort_keys=False, encoding="utf-8")
    return str(path)


def _new_file(path: Path) -> BinaryIO:
    """Replace a file by an empty one that only its owner can read. Configurations contain keys, and
    logs may contain prompts."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


class Process:
    """A program of a fleet, in a session of its own, with a log file.

    `stop` ends every process of the session, and so does the end of `running`.
    """

    def __init__(self, spec: Spec, folder: Path, env: Mapping[str, str]) -> None:
        self.spec: Any = spec
        self.name = spec.name
        self.log = folder / f"{spec.name}.log"
        with _new_file(self.log) as log:
            self._process = self._launch(spec.words(folder), log, {**os.environ, **env})

    def _launch(
        self, command: Sequence[str], log: BinaryIO, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        return self.spec.address(self.log)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise ServerFailed if the process has ended."""
        if not self.is_alive:
            code = self._process.returncode
            raise ServerFailed(f"{self.name} ended with {code}:\n{end_of(self.log)}")

    def is_ready(self) -> bool:
        """Whether the process answers. Raises ServerFailed if it has ended."""
        self.check()
        return self.spec.answers(self.log)

    def kill(self) -> None:
        """Send SIGKILL to every process of the session, and wait for the first."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to every process of the session. Returns at once."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        """Signal all processes of the session, even if its first process has ended. Do nothing if
        the first process's pid belongs to a new process."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive or not psutil.pid_exists(self.pid):
                os.killpg(self.pid, number)

    def stop(self) -> None:
        """End the session: SIGTERM first, then SIGKILL for processes that are left."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self.kill()


class Server(Process, Client):
    """A started SGLang server."""

    def __init__(self, spec: ServerSpec, folder: Path, env: Mapping[str, str]) -> None:
        Process.__init__(self, spec, folder, {**_FORKED_START, **env})
        Client.__init__(self, self.address)

    def stop(self) -> None:
        """End the server at once.

        SIGTERM would end its scheduler just as abruptly. Then the server's other processes would
        report a crash, and wait for 5 s.
        """
        self.kill()


@contextlib.contextmanager
def running(
    *specs: Spec,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 180.0,
) -> Iterator[list[Any]]:
    """Start servers side by side, and yield them once all are ready. At the end, also after SIGTERM
    and SIGHUP, end all of these servers, even if the caller has removed them from the list.

    After the start of a server on a GPU, the next server waits until all started servers are ready.
    Raises ServerFailed.
    """
    env = env or {}
    with terminable(), contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="droidspeak-")))
        folder.mkdir(0o700, parents=True, exist_ok=True)
        servers: list[Process] = []
        stack.callback(_stop_all, servers)
        for spec in specs:
            spec.check()
        for spec in specs:
            with uninterrupted():
                servers.append(spec.start(folder, env))
            if spec.is_on_gpu(env):
                _wait_for(servers, start_timeout_s)
        _wait_for(servers, start_timeout_s)
        yield list(servers)


def _wait_for(started: Sequence[Process], timeout_s: float) -> None:
    """Wait until all processes are ready. Raises ServerFailed if one ends or takes too long."""
    waiting, started_s = started, time.monotonic()
    while waiting := [server for server in waiting if not server.is_ready()]:
        for server in started:
            server.check()
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > timeout_s:
            late = waiting[0]
            raise ServerFailed(
                f"{late.name} is not ready after {elapsed_s:.0f} s; if it is still loading, give a "
                f"larger --start-timeout:\n{end_of(late.log)}"
            )
        time.sleep(_LOOK_S)


def _stop_all(servers: Sequence[Process]) -> None:
    """End all processes together. Each one ends even if ending another one fails."""
    with uninterrupted(), contextlib.ExitStack() as stack:
        for server in servers:
            server.terminate()
        for server in servers:
            stack.callback(server.stop)
