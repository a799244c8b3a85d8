"""What the CUDA path does on this device: `python -m benchmarks.gpu`."""
