"""Read and check the settings, the model and the profiles when a server starts."""
