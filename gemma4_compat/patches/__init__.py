"""One bug, one file, in the folder of its topic.

A module in one of these folders that builds a ``PATCH`` is a patch; nothing is registered.  The
docstring of a folder is the title of its topic.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from ..engine import Patch
from ..engine.gate import Evaluation, evaluate
from ..versions import FLOORS

#: in the order in which people read about them
TOPICS = (
    "offloading",
    "generation",
    "images_and_sound",
    "adapters",
    "training",
    "avx512_cpu",
)


def topics() -> dict[str, list[ModuleType]]:
    """The modules of the patches, in order of name, by the name of their topic's folder."""
    names = {topic: _modules_in(importlib.import_module(f"{__name__}.{topic}")) for topic in TOPICS}
    return {
        topic: [importlib.import_module(f"{__name__}.{topic}.{name}") for name in modules]
        for topic, modules in names.items()
    }


def load() -> list[Patch]:
    """Import every patch module, and return their patches in order of name."""
    patches: list[Patch] = [module.PATCH for modules in topics().values() for module in modules]
    return sorted(patches, key=lambda patch: patch.name)


def gate(patch: Patch) -> Evaluation:
    """Whether a patch is for the installed versions; no probe is asked."""
    return evaluate(patch.affects, FLOORS)


def _modules_in(package: ModuleType) -> Iterable[str]:
    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))
