"""Workers and engines of one machine, as processes."""
