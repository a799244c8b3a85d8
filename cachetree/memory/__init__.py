"""Host memory: where pages lie, and where fetched layers arrive."""
