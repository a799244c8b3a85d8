"""What a fetch from one place takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """As it is now. Fetches share it evenly: one ends when it and as much of each other have come.

    For its bytes B, A bytes ahead of it and a backlog of r1, r2, ...:
    (B + A + min(r1, B) + min(r2, B) + ...) × byte_s.
    """

    byte_s: float
    fixed_s: float = 0.0
    """Of any fetch, however short: a round trip, and until its end is seen."""
    margin: float = 1.0
    """What transfers of late took of what was predicted."""
    backlog: Sequence[int] = ()
    """Bytes that each fetch under way still has to bring."""
    ahead: int = 0
    """Bytes that come first, at most: nobody waits for them any more, and nobody can stop them."""
    copy_byte_s: float = 0.0
    """From host memory into the device's KV slots."""

    def seconds(self, num_bytes: int) -> float:
        """Until that many bytes of a new fetch have come, beside `fixed_s`."""
        if not num_bytes:
            return 0.0
        shared = sum(min(rest, num_bytes) for rest in self.backlog)
        return self.margin * self.byte_s * (num_bytes + self.ahead + shared)

    def copy_s(self, num_bytes: int) -> float:
        return self.copy_byte_s * num_bytes


FREE: Final = Link(byte_s=0.0)
"""The engine's own pool, and what nothing is known of."""
