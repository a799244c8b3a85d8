"""Handle Ctrl-C, SIGTERM and SIGHUP while processes are started and ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Final

_ENDS: Final = signal.SIGTERM, signal.SIGHUP


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, unless they are handled or
    ignored already. Works only in the main thread."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    ours = [it for it in _ENDS if is_main and signal.getsignal(it) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP, so that no process is half started or half ended.

    This uses handlers, not a signal mask: a new process would inherit the mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: arrived.append(number))
        for number in (signal.SIGINT, *_ENDS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in arrived:  # The first signal that is not ignored ends the loop.
            signal.raise_signal(number)
