"""Where workers are found that no file lists: names in DNS, and leases in Redis.

    dns://NAME:PORT                           every address of the name, at that port
    redis://[USER:PASSWORD@]HOST:PORT[/DB]    one key for each worker; rediss:// is over TLS
        cachetree:FAMILY:WORKER = {"address": ..., "public_key": ...}

A worker writes its key every 3 seconds and Redis drops it after 10, by its own clock: no time of
day is compared. Nobody is believed for standing in a directory: it says whom to try, and who is
found there has to prove the same as one that is listed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec

from cachetree.checkpoint import Family
from cachetree.errors import UNREADABLE, ConfigError
from cachetree.ids import Location
from cachetree.transport.address import Address, without_password
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.wakeup import CLOSE_S

log = logging.getLogger("cachetree.directory")

LEASE_S: Final = 10
RENEW_S: Final = 3.0
MAX_FOUND: Final = 256
"""Workers taken from one directory: as many as have sessions with one."""

_TIMEOUT_S: Final = 1.0
_ID_CHARS: Final = 16
_MAX_LEASE_BYTES: Final = 4096
_SCAN_KEYS: Final = 1000
_MAX_SCANS: Final = 64
_EXAMPLE: Final = "write dns://NAME:PORT or redis://HOST:PORT/DB"


class Found(msgspec.Struct, frozen=True):
    """A worker as a directory tells of it, and as it stands at its key, where fields that nobody
    knows are skipped: nothing of it is proven."""

    address: Annotated[Location, msgspec.Meta(max_length=256)]
    public_key: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Empty where none is told."""


Look = Callable[[], Sequence[Found]]
"""Who is in a directory, at most `MAX_FOUND`. Blocks, where a server is silent for seconds; raises
OSError or ValueError where there is no answer."""


class Rounds:
    """Does one thing every few seconds, in a thread of its own that others never wait for.

    Its failures are logged, each minute one; `has_gone_well` is set once there was none.
    """

    def __init__(
        self, name: str, turn: Callable[[], object], end: Callable[[], object] | None = None
    ) -> None:
        """`name` is a URL; `end` is the last thing to do."""
        self.name: Final = without_password(name)
        self.error = ""
        """Empty where the last one went well."""
        self.has_gone_well: Final = threading.Event()
        self._limiter = LogLimiter()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(turn, end), name=f"cachetree-directory {self.name}", daemon=True
        )
        self._thread.start()

    def close(self, most_s: float = CLOSE_S) -> None:
        """Waits for its thread so long. Idempotent."""
        self._closing.set()
        self._thread.join(most_s)

    def _run(self, turn: Callable[[], object], end: Callable[[], object] | None) -> None:
        while not self._closing.is_set():
            self._do(turn)
            self._closing.wait(RENEW_S)
        if end is not None:
            self._do(end)

    def _do(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (OSError, ValueError) as exc:
            self.error = " ".join(str(exc).split()) or type(exc).__name__
            if self._limiter.may(self.name):
                log.warning("directory %s does not answer: %s", self.name, self.error)
        except Exception as exc:
            self.error = f"internal error: {exc}"
            log.exception("directory %s: internal error", self.name)
        else:
            if self.error:
                log.info("directory %s answers again", self.name)
            self.error = ""
            self.has_gone_well.set()


def is_directory(peer: str) -> bool:
    """Whether an entry of `peers` names workers, in place of one."""
    return peer.startswith(("dns://", "redis://", "rediss://"))


def look_into(url: str, family: Family, own_epoch: int) -> Look:
    """Asks nobody yet; raises ConfigError."""
    if url.startswith("dns://"):
        return partial(resolved, check_directory(url, field="peers"))
    return RedisLeases(url, family, own_epoch).look


def resolved(
    name: Address, resolve: Callable[..., Sequence[Any]] = socket.getaddrinfo
) -> Sequence[Found]:
    """All addresses that the name has now."""
    answers = resolve(name.host, name.port, type=socket.SOCK_STREAM)
    urls = {Address(answer[4][0], name.port).url for answer in answers}
    return [Found(Location(url)) for url in sorted(urls)[:MAX_FOUND]]


class RedisLeases:
    """The workers of one family: the own one's key, and who else has one."""

    def __init__(self, url: str, family: Family, own_epoch: int) -> None:
        """Asks nobody yet; raises ConfigError."""
        self._redis = _client(url, field="peers")
        self._own_key: Final = lease_key(family, own_epoch)
        self._limiter = LogLimiter()

    def look(self) -> Sequence[Found]:
        with _as_os_errors():
            keys = self._keys()
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(key, 0, _MAX_LEASE_BYTES - 1)
            values = pipeline.execute(raise_on_error=False)
        pairs = zip(keys, values, strict=True)  # A lease may have ended meanwhile.
        return [it for key, value in pairs if value for it in self._read(key, value)]

    def renew(self, own: Found) -> None:
        with _as_os_errors():
            self._redis.set(self._own_key, msgspec.json.encode(own), ex=LEASE_S)

    def withdraw(self) -> None:
        with _as_os_errors():
            self._redis.delete(self._own_key)

    def _keys(self) -> list[bytes]:
        # Of one length, so that Redis sends no longer names.
        pattern = self._own_key[:-_ID_CHARS] + _ID_CHARS * b"?"
        keys: set[bytes] = set()
        cursor = 0
        for _ in range(_MAX_SCANS):
            cursor, some = self._redis.scan(cursor, match=pattern, count=_SCAN_KEYS)
            keys.update(some)
            if not cursor or len(keys) > MAX_FOUND:
                return sorted(keys - {self._own_key})[:MAX_FOUND]
        raise OSError(f"more than {_MAX_SCANS * _SCAN_KEYS} keys; give it a database of its own")

    def _read(self, key: bytes, value: Any) -> Iterator[Found]:
        """Nothing where it makes no sense."""
        try:
            if not isinstance(value, bytes):
                raise ValueError("it is no text")
            yield msgspec.json.decode(value, type=Found)
        except UNREADABLE as exc:
            if self._limiter.may(repr(key)):
                log.warning("key %s of the directory is skipped: %s", key, exc)


def announced(url: str, family: Family, epoch: int, own: Found) -> Rounds:
    """Keeps a worker's key in Redis until it is closed; raises ConfigError."""
    leases = RedisLeases(url, family, epoch)
    return Rounds(url, partial(leases.renew, own), leases.withdraw)


def check_directory(url: str, *, field: str) -> Address:
    """Its server, or what is to be resolved; raises ConfigError where it could not be asked."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Without what it says, which may have a part of a password.
        raise ConfigError(
            f"{field} names no directory; {_EXAMPLE}, and what is special in a password as %23"
        ) from None
    database = parts.path.lstrip("/")
    is_odd = parts.query or parts.fragment or not is_directory(url)
    if not parts.hostname or not port or is_odd or (database and not database.isdecimal()):
        # Without what it says, which may have a password.
        raise ConfigError(f"{field} names no directory at {parts.hostname}; {_EXAMPLE}")
    if parts.scheme != "dns":
        _client(url, field=field)
    return Address(parts.hostname, port)


def check_announced(url: str, listen: Address) -> None:
    """Whether a worker that listens there could be told of; raises ConfigError."""
    if url.startswith("dns:"):
        raise ConfigError(f"announce is {url}, which cannot be written; name a Redis")
    check_directory(url, field="announce")
    if listen.is_everywhere:
        raise ConfigError(
            f"announce is set and listen is {listen.url}, where nobody finds this server; listen "
            "at the address that others have for it"
        )


def lease_key(family: Family, epoch: int) -> bytes:
    """Of a worker in Redis."""
    return f"cachetree:{family.digest}:{epoch:0{_ID_CHARS}x}".encode()


def _client(url: str, *, field: str) -> Any:
    """Of Redis; it connects when it is first used. Raises ConfigError."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise ConfigError(
            f"{field} names Redis, and the package redis is not installed; `pip install redis`"
        ) from exc
    once_more = Retry(NoBackoff(), 1)
    return redis.Redis.from_url(
        url,
        protocol=2,  # What every Redis and Valkey speaks.
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=once_more,
    )


@contextmanager
def _as_os_errors() -> Iterator[None]:
    import redis

    try:
        yield
    except redis.RedisError as exc:
        raise ConnectionError(str(exc)) from exc
