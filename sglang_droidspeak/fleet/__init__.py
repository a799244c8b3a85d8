"""Workers and engines of one machine, as processes."""

from cachetree import CacheTreeError


class ServerFailed(CacheTreeError):
    """A server cannot start, or ended before it was ready; the message then holds the end of its
    log."""
