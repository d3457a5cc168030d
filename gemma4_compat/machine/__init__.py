"""Facts about this machine: its memory, and its build of PyTorch."""
