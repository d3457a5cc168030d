"""Checkpoints and adapters as folders, and as repositories on the Hub."""
