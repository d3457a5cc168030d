"""A small, general engine for version-gated, reversible runtime patches.

It knows nothing of Gemma. A patch is a module that builds one :class:`Patch`. This package exports
everything that a patch may use of the engine.
"""

from .patch import (
    Finding,
    Kind,
    Part,
    Patch,
    Replacement,
    broken,
    drifted,
    fixed,
    fixed_if,
)

__all__ = [
    "Finding",
    "Kind",
    "Part",
    "Patch",
    "Replacement",
    "broken",
    "drifted",
    "fixed",
    "fixed_if",
]
