"""Runs users' stories on a tiny random Gemma 4, without and with the patches."""
