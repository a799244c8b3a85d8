"""Run the workers (caches) and engines (SGLang servers) of one machine as processes."""

from cachetree import CacheTreeError


class ServerFailed(CacheTreeError):
    """A server cannot start, or ended before it was ready. The message has the reason, or the end
    of the server's log."""
