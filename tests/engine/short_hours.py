"""Script that runs in a server before it starts, in addition to `slow_device`. The drift guard's
hour takes 0.05 s."""

from __future__ import annotations

import slow_device

from sglang_droidspeak.guard import shadows

if __name__ == "__main__":
    slow_device.place()
    shadows.HOUR_S = 0.05
