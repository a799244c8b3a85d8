"""KV and E in the storage backends of SGLang's HiCache, as a tier of the cache."""

from sglang_droidspeak.hicache.lane import HICACHE, Objects
from sglang_droidspeak.hicache.tier import HiCacheStatus, HiCacheTier, hicache_tier

__all__ = ["HICACHE", "HiCacheStatus", "HiCacheTier", "Objects", "hicache_tier"]
