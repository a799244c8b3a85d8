"""Script that runs in a server before it starts. Every reuse pays, and the server retracts requests
again and again, as if its KV pool were full."""

from __future__ import annotations

import slow_device


def place() -> None:
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 7


if __name__ == "__main__":
    slow_device.place()
    place()
