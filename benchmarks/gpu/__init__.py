"""Test and time this project's code on a CUDA device: `python -m benchmarks.gpu`."""
