"""A tiny random Gemma 4 to try the patches on, and users' stories played on it."""
