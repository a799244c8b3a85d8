"""How this server's peers are doing, for those who run it: in its log and over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from cachetree.transport import PeerState, Source

KEY: Final = "droidspeak"
"""Under which SGLang's `/server_info` has what this extension says."""


def mark_log() -> None:
    """Have the cache's lines about peers begin with `droidspeak: ` in this server's log."""
    logging.getLogger("cachetree.peer").addFilter(_mark)


def not_ready(sources: Sequence[Source]) -> str:
    """Such as `1 of 2 peers not ready`; empty where all are."""
    num_late = sum(it.state != PeerState.READY for it in sources)
    return f"{num_late} of {len(sources)} peers not ready" if num_late else ""


def _mark(record: logging.LogRecord) -> bool:
    record.msg = f"droidspeak: {record.msg}"
    return True
