"""What an operator may set about what stays in memory."""

from __future__ import annotations

from typing import Final

import msgspec

from cachetree.errors import ConfigError

POLICIES: Final = ("lru", "value")


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What leaves memory first, what leaves it unasked, and how much may be kept in it by force."""

    eviction: str = "lru"
    """Which entry makes room for a new one: one of `POLICIES`."""
    ttl_s: float | None = None
    """Entries that nobody has used for so long go; None: only when room is needed."""
    max_pinned_share: float = 0.5
    """Of the budget, how much pins may hold at once."""

    def __post_init__(self) -> None:
        if self.eviction not in POLICIES:
            raise ConfigError(f"eviction is {self.eviction!r}; give one of {', '.join(POLICIES)}")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a positive number, or leave it out")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share is {self.max_pinned_share}; give 0 to 1")
