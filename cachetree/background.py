"""Threads that can wait: whoever computes, or answers, comes first."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

_NICENESS: Final = 10


def give_way() -> None:
    """Have the calling thread run after others, where the system can tell threads apart.

    Nor does it take a processor from whoever computes there when it wakes (`SCHED_BATCH`).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
