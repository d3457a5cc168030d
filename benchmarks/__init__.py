"""Measure what the patches save and cost: ``python -m benchmarks``."""
