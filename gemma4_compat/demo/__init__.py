"""A tiny random Gemma 4 to try the patches on."""
