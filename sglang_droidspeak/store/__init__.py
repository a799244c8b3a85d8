"""Additions to SGLang's KV pool: E of each slot, an index of each model's pages, and copies of new
pages to the cache in host memory."""
