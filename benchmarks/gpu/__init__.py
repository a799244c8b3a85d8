"""Checks of the CUDA path on this device: `python -m benchmarks.gpu`."""
