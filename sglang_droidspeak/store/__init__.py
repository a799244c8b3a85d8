"""Add to SGLang's KV pool: E per slot, an index of the pages of each model, and copies to the
cache."""
