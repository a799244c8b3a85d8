"""What a model is: its identity by content, its family, and how its KV and E are kept."""
