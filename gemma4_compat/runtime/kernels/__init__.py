"""CUDA kernels of this package, and the streams that they run on."""
