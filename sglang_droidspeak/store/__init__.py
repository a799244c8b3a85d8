"""What the KV pool cannot say: E per slot, who has which pages, and the way into the cache."""
