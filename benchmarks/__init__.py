"""What the patches save and cost, measured: ``python -m benchmarks``."""
