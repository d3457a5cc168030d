"""Make Gemma 4 work: 4/8-bit, offloaded, with adapters.

Import this at the top of a script::

    import gemma4_compat

This arms version-gated patches for transformers, accelerate, peft and bitsandbytes.  A patch is
applied when the library that it changes is imported, or at once if it is imported already, and
only on versions that have the bug.  Every patch can be undone exactly.  Importing this package
imports none of those libraries.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from . import versions as _versions
from ._version import __version__
from .engine.status import PatchStatus, State
from .errors import DeadlockError, InputError, MergeError, ModelError, PatchError, RefusedError
from .machine.host_memory import limit_page_locked
from .model.hooks import dispatched_now as _dispatched_now
from .model.hooks import input_device
from .results.status import Status

if TYPE_CHECKING:
    from .engine.core import Engine
    from .inspection import inspect_adapter, inspect_model
    from .merging import merge
    from .patches.offloading.quantization_device import quantize_on
    from .planning import plan

__all__ = [
    "DeadlockError",
    "InputError",
    "MergeError",
    "ModelError",
    "PatchError",
    "PatchStatus",
    "RefusedError",
    "State",
    "Status",
    "__version__",
    "disabled",
    "input_device",
    "inspect_adapter",
    "inspect_model",
    "install",
    "limit_page_locked",
    "merge",
    "plan",
    "quantize_on",
    "status",
    "uninstall",
]

#: the last lines of a status: of a short one, and of one with all patches
_HINTS = (
    "gemma4-compat status -v lists every patch; status PATCH explains one",
    "GEMMA4_COMPAT_NAME=0 turns a patch off, GEMMA4_COMPAT_SPEED=0 all that only make a model "
    "faster. inspect_model(model) says which of these are at work on it, and which are optional.",
)
_lock = threading.RLock()
# A reload of this module must not start a second engine.
_started: Engine | None = globals().get("_started")


def _start() -> Engine:
    """The engine with all patches; they are read when it is needed first."""
    global _started
    with _lock:
        if _started is None:
            _first_import.leave()
            from . import patches
            from .engine import core, status, switches

            logger = logging.getLogger(__name__)
            found = patches.load()
            names = {patch.name: patch.requires for patch in found}
            groups, asking = patches.groups(), patches.groups(asking=True)
            former = {name: patch.name for patch in found for name in patch.former}
            read = switches.read("GEMMA4_COMPAT", names, logger, None, groups, asking, former)
            title, older = f"gemma4-compat {__version__}", _dispatched_now()
            required, renamed = _versions.REQUIRED, read.renamed
            about = status.About(title, _HINTS, _notes, older, required, Status, renamed)
            newest = {"torch": _versions.NEWEST_TORCH, **_versions.NEWEST}
            oldest = {"torch": _versions.OLDEST_TORCH, **_versions.FLOORS}
            _started = core.Engine(found, read, logger, oldest, newest, about)
            _started.start()
    return _started


def _notes() -> tuple[str, ...]:
    from .machine import torch_build

    launch = sys.modules.get(f"{__name__}.runtime.kernels.launch")
    return (*torch_build.notes(), *(launch.without() if launch else ()))


class _FirstImport:
    """Starts the engine when the import of one of the libraries begins."""

    def find_spec(self, name: str, *args: Any) -> Any:
        if name not in _versions.LIBRARIES:
            return None
        _start()
        # The search began before the engine watched imports.
        others = (finder for finder in sys.meta_path if finder is not self)
        finders = [finder for finder in others if hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, *args) for finder in finders)
        return next((spec for spec in specs if spec is not None), None)

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


_first_import = _FirstImport()


#: functions that are imported when they are needed first, and their modules
_LAZY = {
    "inspect_adapter": "inspection",
    "inspect_model": "inspection",
    "merge": "merging",
    "plan": "planning",
    "quantize_on": "patches.offloading.quantization_device",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "_engine":
        return _start()
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _started is None:
    # Warnings about variables come at once.
    _variables = [name.upper().replace("_", "") for name in os.environ]
    _imported = sys.modules.keys() & {*_versions.LIBRARIES}
    if _imported or any("GEMMA4COMPAT" in name for name in _variables):
        _start()
    else:
        sys.meta_path.insert(0, _first_import)


def _named(names: tuple[str, ...], *, asking: bool = False) -> list[str]:
    """The names of patches; groups are replaced by their patches."""
    from . import patches

    groups = patches.groups(asking=asking)
    return [patch for name in names for patch in groups.get(name, (name,))]


def status(*, import_targets: bool = False) -> Status:
    """Return the state of every patch in this process, with its reason and installed versions.

    This call may apply patches: those whose target modules are all imported by now.  If a module
    was reloaded (``importlib.reload``), it has its own code again, and the reason says so.

    Args:
        import_targets: first import the modules that armed patches wait for, and with them those
            of torch, transformers, accelerate, peft and bitsandbytes that are installed.  Then no
            patch is ``armed``.  Without it nothing is imported.

    Example:
        >>> gemma4_compat.status().ok
        True
        >>> print(gemma4_compat.status()["clippable_linear"].symptom)
        Target module Gemma4ClippableLinear(...) is not supported
    """
    engine = _start()
    return cast(Status, engine.import_targets() if import_targets else engine.status())


def install(*names: str) -> Status:
    """Arm or apply the named patches, or all patches if no name is given.  Idempotent.

    A name is that of a patch, of a topic (``offloading``, ``generation``, ``attention``,
    ``images_and_sound``, ``adapters``, ``training``, ``avx512_cpu``, ``legacy``) or of a kind
    (``fix``, ``warning``, ``memory``, ``exact``, ``fast``; ``speed`` is ``exact`` and ``fast``);
    the same for `uninstall` and `disabled`.

    Importing this package does this for all patches but those of the kind ``fast``, which round
    differently or run a step ahead.  These have to be named: a topic does not name them.  Call this
    before a model is loaded: the hooks of an offloaded model go on calling the functions that they
    found, and the status says how many do.  A name asks for the patches of that kind that it
    requires, too; `uninstall` of that name leaves these on.  After `uninstall()` of all, name those
    that a patch requires, too: else it is ``blocked``.  A patch that an environment variable
    switches off stays off.

    Raises:
        ValueError: no patch has that name.

    Example:
        >>> gemma4_compat.install("clippable_linear").ok
        True
        >>> gemma4_compat.install("fast")["one_row_4bit"].name
        'one_row_4bit'
    """
    return cast(Status, _start().install(*_named(names, asking=True)))


def uninstall(*names: str) -> Status:
    """Undo the named patches, or all patches if no name is given; restore the original code.

    Patches that require a named one are undone first.  They are ``blocked`` until the named one
    is installed again.  If other code has changed the same attribute afterwards, the patch stays
    in place with a warning, and so do the patches that it requires.

    Raises:
        ValueError: no patch has that name.

    Example:
        >>> print(gemma4_compat.uninstall("host_embedding")["host_embedding"].state)
        disabled
    """
    return cast(Status, _start().uninstall(*_named(names)))


def disabled(*names: str) -> AbstractContextManager[Status]:
    """A ``with`` block in which the named patches, or all patches if no name is given, are off.

    The patches are off in all threads of the process.

    Raises:
        ValueError: no patch has that name.

    Example:
        >>> with gemma4_compat.disabled("host_embedding") as status:
        ...     print(status["host_embedding"].state)
        disabled
    """
    return cast(AbstractContextManager[Status], _start().disabled(_named(names)))
