"""What the KV pool cannot say: E and provenance per slot, and the way into the cache."""
