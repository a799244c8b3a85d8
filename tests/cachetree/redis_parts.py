"""A Redis for tests: the real server where it is installed, and one in this process that knows the
few commands that directories use."""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sglang_droidspeak.fleet.servers import ProgramSpec, end_of, free_port

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(SERVER is None, reason="needs redis-server or valkey-server")


class FakeRedis:
    """Keys that expire when `ahead_s` says so; `url` is where clients find it."""

    def __init__(self) -> None:
        self.keys: dict[bytes, tuple[Any, float]] = {}
        self.ahead_s = 0.0
        """How far its clock has jumped."""
        self.is_broken = False
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline():
                    words = [self._word() for _ in range(int(line[1:]))]
                    self.wfile.write(fake.answer(words))

            def _word(self) -> bytes:
                size = int(self.rfile.readline()[1:])
                return self.rfile.read(size + 2)[:size]

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, words: list[bytes]) -> bytes:
        now_s = time.monotonic() + self.ahead_s
        self.keys = {key: it for key, it in self.keys.items() if it[1] > now_s}
        if self.is_broken:
            return b"-LOADING not now\r\n"
        match words[0].upper(), *words[1:]:
            case b"SET", key, value, b"EX", seconds:
                self.keys[key] = value, now_s + int(seconds)
            case b"DEL", key:
                return b":%d\r\n" % (self.keys.pop(key, None) is not None)
            case b"SCAN", _, b"MATCH", pattern, b"COUNT", _:
                found = [it for it in self.keys if fnmatch.fnmatch(it.decode(), pattern.decode())]
                names = b"".join(_bulk(it) for it in found)
                return b"*2\r\n" + _bulk(b"0") + b"*%d\r\n" % len(found) + names
            case b"GETRANGE", key, _, stop:
                value = self.keys.get(key, (b"", 0.0))[0]
                if not isinstance(value, bytes):
                    return b"-WRONGTYPE not a string\r\n"
                return _bulk(value[: int(stop) + 1])
        return b"+OK\r\n"


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


@contextlib.contextmanager
def fake_redis() -> Iterator[FakeRedis]:
    fake = FakeRedis()
    try:
        yield fake
    finally:
        fake.close()


class RealRedis:
    """A redis-server without a disk, at one port whatever happens to it."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        port = free_port()
        command = [str(SERVER), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
        self._spec = ProgramSpec(command=command, port=port, name="redis")
        self.url = f"redis://127.0.0.1:{port}/3"
        self.client = redis.Redis.from_url(self.url)
        self._folder = folder
        self._env = env or {}
        self.start()

    def start(self) -> None:
        self.process = self._spec.start(self._folder, self._env)
        deadline_s = time.monotonic() + 30
        while not self.process.is_ready():
            assert time.monotonic() < deadline_s, end_of(self.process.log)
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.client.close()
        self.kill()
