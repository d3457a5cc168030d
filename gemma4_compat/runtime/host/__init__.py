"""Weights in host memory and on the disk: copied and looked up."""
