"""The families of models for which transformers has the same code, in a module for each.

A patch for all of them has a part for each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family's name in texts, its module in transformers, and the prefix of its classes."""

    name: str
    module: str
    prefix: str
    #: the releases of transformers that have it
    requirement: str = "transformers"


GEMMA4 = Family("Gemma 4", "transformers.models.gemma4.modeling_gemma4", "Gemma4")
GEMMA3N = Family("Gemma 3n", "transformers.models.gemma3n.modeling_gemma3n", "Gemma3n")
UNIFIED = Family(
    "Gemma 4 unified",
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "Gemma4Unified",
    "transformers>=5.10",
)
FAMILIES = (GEMMA4, UNIFIED, GEMMA3N)


def former(name: str, *families: Family) -> tuple[str, ...]:
    """The names that a patch of several families had for all but Gemma 4."""
    prefixes = {UNIFIED: "unified", GEMMA3N: "gemma3n"}
    return tuple(f"{prefixes[family]}_{name}" for family in families or (UNIFIED, GEMMA3N))
