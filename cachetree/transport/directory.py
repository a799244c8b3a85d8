"""Directories of workers: `dns://NAME:PORT` stands for all addresses of a DNS name.

A directory only says which workers to try. These workers have to prove the same keys as workers
that the settings list.
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
"""Largest number of workers taken from one directory, the same number as a worker's `max_peers`."""

_EXAMPLE: Final = "write dns://NAME:PORT"

Look = Callable[[], Sequence[Location]]
"""Function that asks a directory for its workers, and returns at most `MAX_FOUND`. Blocks for
seconds if a DNS server is silent. Raises OSError or ValueError if there is no answer."""


class PeriodicTask:
    """Call a function every `ASK_EVERY_S` seconds, in a thread of its own.

    Failures are logged, at most one a minute. `has_gone_well` is set after the first success.
    """

    def __init__(self, name: str, step: Callable[[], object]) -> None:
        """`step` asks the directory at URL `name`."""
        self.name: Final = without_password(name)
        self.error = ""
        """Error of the last call of the function. Empty if that call succeeded."""
        self.has_gone_well: Final = threading.Event()
        self._limiter = LogLimiter()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(step,), name=f"cachetree-directory {self.name}", daemon=True
        )
        self._thread.start()

    def close(self, most_s: float = CLOSE_S) -> None:
        """Stop repeating, and wait at most `most_s` seconds for the thread. Idempotent."""
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
    """Return whether an entry of `peers` names a directory instead of one worker."""
    return peer.startswith("dns://")


def addresses_of(
    name: Address, resolve: Callable[..., Sequence[Any]] = socket.getaddrinfo
) -> Sequence[Location]:
    """Return the workers at all IP addresses of a name, at most `MAX_FOUND`. Blocks."""
    answers = resolve(name.host, name.port, type=socket.SOCK_STREAM)
    urls = {Address(answer[4][0], name.port).url for answer in answers}
    return [Location(url) for url in sorted(urls)[:MAX_FOUND]]


def parse_directory(url: str, *, field: str) -> Address:
    """Parse a directory URL, a value of the setting `field`, into a DNS name and port. Raises
    ConfigError."""
    wrong = ConfigError(
        f"{field} is {without_password(url)!r}, which names no directory; {_EXAMPLE}"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # The error's text is left out: it may have a part of a password.
        raise wrong from None
    if not parts.hostname or not port or parts.path or parts.query or parts.fragment:
        raise wrong
    return Address(parts.hostname, port)
