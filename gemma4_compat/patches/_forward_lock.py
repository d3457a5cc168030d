"""One lock for all offloaded modules of a model.

A thread holds it during the forward of such a module, or of the model that contains them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper, wraps
from typing import Any

from ..model.hooks import offload_hook
from ._not_copied import NotCopied, attached

_LOCK = "_forward_lock"  # an attribute of the hook


class ForwardLock(NotCopied):
    """A re-entrant lock.  The hooks of a deep-copied model share a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: Any) -> ForwardLock:
        return ForwardLock()


def share_lock(root: Any) -> None:
    """Make the forwards of ``root`` and of the offloaded modules in it use the same lock."""
    offloaded = [module for module in root.modules() if offload_hook(module) is not None]
    if not offloaded:
        return
    lock = ForwardLock()
    for module in (root, *offloaded):
        if vars(module).get("_hf_hook") is not None:
            setattr(module._hf_hook, _LOCK, lock)
            lock_forward(module)


def lock_forward(module: Any) -> None:
    """Make the forward of a module with a hook take the hook's lock."""
    from torch.compiler import is_compiling

    hooked = vars(module).get("forward")
    if hooked is None or _is_locked(hooked):
        return

    @wraps(getattr(hooked, "func", hooked))
    def new_forward(module: Any, hooked: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return hooked(*args, **kwargs)
        with attached(module._hf_hook, _LOCK, ForwardLock):
            return hooked(*args, **kwargs)

    new_forward._is_locked = True  # type: ignore[attr-defined]
    module.forward = update_wrapper(partial(new_forward, module, hooked), module._old_forward)


def lock_of(module: Any) -> AbstractContextManager[None]:
    """The lock that the forward of this module takes; a ``nullcontext`` if it takes none."""
    hook = vars(module).get("_hf_hook")
    lock: ForwardLock | None = None if hook is None else vars(hook).get(_LOCK)
    return nullcontext() if lock is None else lock


def _is_locked(forward: Any) -> bool:
    return hasattr(getattr(forward, "func", None), "_is_locked")
