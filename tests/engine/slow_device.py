"""Script that runs in a server before it starts. The server assumes that its device is very slow,
so reuse always pays.

The times of a tiny model on a busy machine are noise, so some requests would end as `slower`.
`test_faults`, `test_stall_servers` and `test_never_slower` have real times.
"""

from __future__ import annotations


def place() -> None:
    from cachetree.planning import PrefillCost
    from sglang_droidspeak.cost import Meter

    Meter.prefill = property(lambda self: PrefillCost(token_s=0.1, context_s=1e-6))


if __name__ == "__main__":
    place()
