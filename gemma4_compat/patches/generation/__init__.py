"""Caches and generation."""
