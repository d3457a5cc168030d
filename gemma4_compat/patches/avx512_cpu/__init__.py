"""4-bit on a CPU with AVX512-BF16."""
