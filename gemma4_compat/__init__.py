"""Make Gemma 4 work: 4/8-bit, offloaded, with adapters.

Import this at the top of a script::

    import gemma4_compat

and version-gated patches for transformers, accelerate, peft and bitsandbytes are armed.  They
are applied when those libraries are imported (or at once where they already are), only on the
versions that have the bug, and can be taken back exactly.  Importing this package imports none
of those libraries.
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


def _start() -> Engine:
    found = _patches.load()
    switches = _read_switches("GEMMA4_COMPAT", [patch.name for patch in found], _logger)
    engine = Engine(found, switches, _logger, _FLOORS, _NEWEST)
    engine.start()
    return engine


# A reload of this module must not arm a second engine beside the first.
_engine: Engine = globals().get("_engine") or _start()


def status(*, import_targets: bool = False) -> Status:
    """The state of every patch in this process, with the reason and the versions found.

    This may apply patches: those that wait for nothing any more, and again those whose target
    module was reloaded.

    Args:
        import_targets: first import the modules that armed patches wait for, and with them
            torch, transformers, accelerate, peft and bitsandbytes as far as they are installed.
            Then no patch is ``armed``.  Without it nothing is imported.
    """
    return _engine.import_targets() if import_targets else _engine.status()


def install(*names: str) -> Status:
    """Arm or apply the named patches (all without names); idempotent.

    Called by the import of this package.  A patch switched off by the environment stays off.

    Raises:
        ValueError: there is no patch of that name.
    """
    return _engine.install(*names)


def uninstall(*names: str) -> Status:
    """Take the named patches back (all without names), leaving their owners as they were.

    A patch that requires one of them is taken back first; it is ``blocked`` until that one is
    installed again.  A patch that somebody else has patched over is left in place, with a
    warning, and so are the patches that it needs.

    Raises:
        ValueError: there is no patch of that name.
    """
    return _engine.uninstall(*names)


def disabled(*names: str) -> AbstractContextManager[Status]:
    """A ``with`` block in which the named patches (all without names) are off.

    Process-wide: other threads see the patches off as well.
    """
    return _engine.switched(names, on=False)
