"""What each eviction policy would have kept: traces of requests, replayed against real trees."""

from .generate import GENERATORS, generate
from .replay import Outcome, replay
from .trace import Header, PageNames, Request, Trace, read_trace, write_trace

__all__ = [
    "GENERATORS",
    "Header",
    "Outcome",
    "PageNames",
    "Request",
    "Trace",
    "generate",
    "read_trace",
    "replay",
    "write_trace",
]
