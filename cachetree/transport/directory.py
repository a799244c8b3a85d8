"""Workers that no file lists, by a name in DNS: `dns://NAME:PORT` is each of its addresses.

Nobody is believed for standing in a directory: it says whom to try, and who is found there has to
prove the same as one that is listed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from cachetree.errors import ConfigError
from cachetree.ids import Location
from cachetree.transport.address import Address, without_password
from cachetree.transport.backoff import LogLimiter
from cachetree.transport.wakeup import CLOSE_S

log = logging.getLogger("cachetree.directory")

ASK_EVERY_S: Final = 3.0
MAX_FOUND: Final = 256
"""Workers taken from one directory: as many as have sessions with one."""

_EXAMPLE: Final = "write dns://NAME:PORT"

Look = Callable[[], Sequence[Location]]
"""Who is in a directory, at most `MAX_FOUND`. Blocks, where a server is silent for seconds; raises
OSError or ValueError where there is no answer."""


class PeriodicTask:
    """A task that a thread of its own does every few seconds; others never wait for that thread.

    Its failures are logged, each minute one; `has_gone_well` is set once there was none.
    """

    def __init__(self, name: str, step: Callable[[], object]) -> None:
        """`name` is a URL."""
        self.name: Final = without_password(name)
        self.error = ""
        """Empty where the last one went well."""
        self.has_gone_well: Final = threading.Event()
        self._limiter = LogLimiter()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(step,), name=f"cachetree-directory {self.name}", daemon=True
        )
        self._thread.start()

    def close(self, most_s: float = CLOSE_S) -> None:
        """Waits for its thread so long. Idempotent."""
        self._closing.set()
        self._thread.join(most_s)

    def _run(self, step: Callable[[], object]) -> None:
        while not self._closing.is_set():
            self._do(step)
            self._closing.wait(ASK_EVERY_S)

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
    return peer.startswith("dns://")


def addresses_of(
    name: Address, resolve: Callable[..., Sequence[Any]] = socket.getaddrinfo
) -> Sequence[Location]:
    """All addresses that the name resolves to now."""
    answers = resolve(name.host, name.port, type=socket.SOCK_STREAM)
    urls = {Address(answer[4][0], name.port).url for answer in answers}
    return [Location(url) for url in sorted(urls)[:MAX_FOUND]]


def parse_directory(url: str) -> Address:
    """The name to resolve, and the port; raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Without what it says, which may have a part of a password.
        raise ConfigError(f"peers names no directory; {_EXAMPLE}") from None
    if not parts.hostname or not port or parts.path or parts.query or parts.fragment:
        # Without what it says, which may have a password.
        raise ConfigError(f"peers names no directory at {parts.hostname}; {_EXAMPLE}")
    return Address(parts.hostname, port)
