"""4-bit, 8-bit and offloading."""
