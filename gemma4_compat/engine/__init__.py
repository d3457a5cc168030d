"""A small, general engine for version-gated, reversible runtime patches.

It knows nothing of Gemma. A patch is a module that builds one :class:`Patch`; everything a
patch needs is exported here, and nothing else of the engine is its business.
"""

from .patch import Finding, Kind, Patch, Replacement, broken, drifted, fixed

__all__ = ["Finding", "Kind", "Patch", "Replacement", "broken", "drifted", "fixed"]
