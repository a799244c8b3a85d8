"""What is known and checked when a server starts."""
