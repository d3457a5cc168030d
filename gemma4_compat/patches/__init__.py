"""One bug, one file, in the folder of its topic.

Each module in a topic's folder defines one patch, as ``PATCH``; no registration is needed.  The
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
from ._code import checking_names

#: In the order in which the documentation lists them.
TOPICS = (
    "offloading",
    "generation",
    "attention",
    "images_and_sound",
    "adapters",
    "training",
    "avx512_cpu",
)


def topics() -> dict[str, list[ModuleType]]:
    """Topic folder -> its patch modules, sorted by name."""
    packages = {topic: importlib.import_module(f"{__name__}.{topic}") for topic in TOPICS}
    return {topic: [*_modules_in(package)] for topic, package in packages.items()}


def load() -> list[Patch]:
    """Import every patch module and return the patches, sorted by name."""
    patches: list[Patch] = [module.PATCH for modules in topics().values() for module in modules]
    for patch in patches:
        if (probe := patch.probe_function) and not hasattr(probe, "__wrapped__"):
            patch.probe_function = checking_names(patch.name, probe)
    return sorted(patches, key=lambda patch: patch.name)


def groups() -> dict[str, list[str]]:
    """The names of the patches of each topic, and of each kind."""
    found = {t: [module.PATCH.name for module in modules] for t, modules in topics().items()}
    for patch in load():
        found.setdefault(patch.kind.value, []).append(patch.name)
    return found


def gate(patch: Patch) -> Evaluation:
    """Whether a patch applies to the installed versions; no probe runs."""
    return evaluate(patch.affects, FLOORS)


def _modules_in(package: ModuleType) -> Iterable[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    public = (name for name in names if not name.startswith("_"))
    return (importlib.import_module(f"{package.__name__}.{name}") for name in public)
