"""Workers and engines of one machine, as processes."""

from cachetree import CacheTreeError


class ServerFailed(CacheTreeError):
    """A server cannot start, or ended before it was ready. The message then has the end of its
    log."""
