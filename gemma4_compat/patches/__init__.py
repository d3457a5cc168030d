"""One bug, one file, in the folder of its topic.

Each module in a topic's folder defines one patch, as ``PATCH``; no registration is needed.  The
docstring of a folder is the title of its topic.  ``legacy`` has those that will be removed.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

from ..engine import Kind, Patch
from ..engine.gate import Evaluation, Outcome, evaluate
from ..versions import FLOORS

logger = logging.getLogger(__name__)

#: In the order in which the documentation lists them.
TOPICS = (
    "offloading",
    "generation",
    "attention",
    "images_and_sound",
    "adapters",
    "training",
    "avx512_cpu",
    "legacy",
)
#: Each patch in ``legacy``: its former topic, whose name still names it, and the day after which
#: the next version leaves it out.  That is a year after the first release with the fix, by the date
#: of the files in its wheel on PyPI.
LEGACY = {
    "audio_uint8_weights": ("images_and_sound", "2027-06-10"),  # transformers 5.11.0
    "experts_switch_overhead": ("generation", "2027-07-15"),  # transformers 5.14.0
    "full_attention_memory": ("attention", "2027-07-03"),  # transformers 5.13.0
    "hf_initialized_flag": ("offloading", "2027-06-11"),  # accelerate 1.14.0
    "image_block_mask": ("images_and_sound", "2027-07-03"),  # transformers 5.13.0
    "ple_mask_device": ("offloading", "2027-05-20"),  # transformers 5.9.0
    "sliding_cache_layers": ("generation", "2027-07-15"),  # transformers 5.14.0
    "vision_uint8_pixels": ("images_and_sound", "2027-07-03"),  # transformers 5.13.0
}


@cache
def topics() -> dict[str, list[ModuleType]]:
    """Topic folder -> its patch modules, sorted by name."""
    packages = {topic: importlib.import_module(f"{__name__}.{topic}") for topic in TOPICS}
    return {topic: [*_modules_in(package)] for topic, package in packages.items()}


def load() -> list[Patch]:
    """Import every patch module and return the patches, sorted by name."""
    patches: list[Patch] = [module.PATCH for modules in topics().values() for module in modules]
    names: dict[str, list[str]] = {}
    with suppress(OSError):  # a frozen application may have no data files
        names = json.loads(pkgutil.get_data(__name__, "names.json") or "{}")
    for patch in patches:
        patch.names = names.get(patch.name, ())
    patches += _of_other_packages({patch.name for patch in patches})
    return sorted(patches, key=lambda patch: patch.name)


def _of_other_packages(taken: set[str]) -> Iterable[Patch]:
    """The patches that installed packages name in the entry-point group `gemma4_compat.patches`."""
    for point in entry_points(group="gemma4_compat.patches"):
        try:
            patch = point.load()
            if not isinstance(patch, Patch) or patch.name in taken:
                raise TypeError(f"{point.value} is no Patch with a name of its own")
        except Exception as error:  # another package's mistake must not end the user's program
            logger.warning("the patch %s is left out: %s", point.name, error)
        else:
            taken.add(patch.name)
            yield patch


def groups(*, asking: bool = False) -> dict[str, list[str]]:
    """The names of the patches of each topic, of each kind, and of ``speed``.

    A patch in ``legacy`` is in its former topic, too.  Those of the kind ``fast`` are left out of
    the topics if ``asking``: their kind, ``speed`` and their own names ask for them.
    """
    found: dict[str, list[str]] = {name: [] for name in (*TOPICS, *(kind.value for kind in Kind))}
    for topic, modules in topics().items():
        for patch in (module.PATCH for module in modules):
            found[patch.kind.value].append(patch.name)
            if not (asking and patch.kind is Kind.FAST):
                former, _ = LEGACY.get(patch.name, (topic, ""))
                for each in {topic, former}:
                    found[each].append(patch.name)
    return {**found, "speed": found["exact"] + found["fast"]}


def gate(patch: Patch) -> Evaluation:
    """Whether a patch, or a part of it, applies to the installed versions; no probe runs."""
    found = [evaluate(patch.gate_of(unit), FLOORS) for unit in patch.units]
    applies = (Outcome.INSIDE, Outcome.UNDECIDED)
    return next((each for each in found if each.outcome in applies), found[0])


def _modules_in(package: ModuleType) -> Iterable[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    public = (name for name in names if not name.startswith("_"))
    return (importlib.import_module(f"{package.__name__}.{name}") for name in public)
