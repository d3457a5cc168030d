"""Weights in host memory and on the disk: copied, looked up and read ahead."""
