"""Make Gemma 4 work: 4/8-bit, offloaded, with adapters.

Import this at the top of a script::

    import gemma4_compat

This arms version-gated patches for transformers, accelerate, peft and bitsandbytes.  A patch is
applied when the library that it changes is imported, or at once if it is imported already, and
only on versions that have the bug.  Every patch can be undone exactly.  Importing this package
imports none of those libraries.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from . import patches as _patches
from ._version import __version__
from .engine.core import Engine
from .engine.status import PatchStatus, State, Status
from .engine.switches import read as _read_switches
from .errors import InputError, MergeError, PatchError
from .model.hooks import input_device
from .model.host_memory import limit_page_locked
from .versions import FLOORS as _FLOORS
from .versions import NEWEST as _NEWEST

__all__ = [
    "InputError",
    "MergeError",
    "PatchError",
    "PatchStatus",
    "State",
    "Status",
    "__version__",
    "disabled",
    "input_device",
    "install",
    "limit_page_locked",
    "status",
    "uninstall",
]

_logger = logging.getLogger(__name__)
_GROUPS = _patches.groups()


def _named(names: tuple[str, ...]) -> list[str]:
    """The names of patches; groups are replaced by their patches."""
    return [patch for name in names for patch in _GROUPS.get(name, (name,))]


def _start() -> Engine:
    all_patches = _patches.load()
    names = {patch.name: patch.requires for patch in all_patches}
    switches = _read_switches("GEMMA4_COMPAT", names, _logger, None, _GROUPS, _patches.GONE)
    engine = Engine(all_patches, switches, _logger, _FLOORS, _NEWEST)
    engine.start()
    return engine


# A reload of this module must not start a second engine.
_engine: Engine = globals().get("_engine") or _start()


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
    return _engine.import_targets() if import_targets else _engine.status()


def install(*names: str) -> Status:
    """Arm or apply the named patches, or all patches if no name is given.  Idempotent.

    A name is that of a patch, of a topic (``offloading``, ``generation``, ``attention``,
    ``images_and_sound``, ``adapters``, ``training``, ``avx512_cpu``) or of a kind (``fix``,
    ``warning``, ``speed``); the same for `uninstall` and `disabled`.

    Importing this package does this for all patches.  A patch that an environment variable
    switches off stays off.

    Raises:
        ValueError: no patch has that name.

    Example:
        >>> gemma4_compat.install("clippable_linear").ok
        True
    """
    return _engine.install(*_named(names))


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
    return _engine.uninstall(*_named(names))


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
    return _engine.disabled(_named(names))
