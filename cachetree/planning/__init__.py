"""Which of a sender's layers to load and which to recompute. Pure: values in, a value out."""
