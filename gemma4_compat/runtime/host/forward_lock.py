"""One lock for all offloaded modules of a model.

A thread holds it during the forward of such a module, or of the model that contains them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, update_wrapper, wraps
from typing import Any

from ...model.hooks import offload_hook
from ...objects import NotCopied, attached

logger = logging.getLogger(__name__)

_LOCK = "_forward_lock"  # an attribute of the hook

#: Seconds between two looks at a lock that another thread holds, and at that thread.
_POLL = 0.0005
_LOOK = 0.05
#: A thread waits for another one if it does not leave a function of these modules for so many
#: seconds, or any function for ``_STANDS_STILL`` seconds.
_WAITING = ("threading.py", "selectors.py", "queue.py", "multiprocessing", "concurrent", "asyncio")
_WAITS = 2.0
_STANDS_STILL = 60.0


class ForwardLock(NotCopied):
    """A re-entrant lock.  The hooks of a deep-copied model share a new one.

    The thread that holds it may wait for another thread that needs it: in a hook, for a worker that
    runs another layer, or for the lock of another model.  Then the other thread goes on, as if the
    first one ran its forward.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._awaited: set[int] = set()  # threads that the owner waits for
        self._inside: ForwardLock | None = None  # their lock
        _all.add(self)

    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident() and self._lock.locked()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which this thread holds the lock."""
        own = threading.get_ident()
        if self.is_held():
            yield
        elif self._lock.locked() and not self._wait(own):
            self._awaited.add(own)
            self._inside = self._inside or ForwardLock()
            with self._inside.held():
                yield
        else:
            with self._lock:
                self._owner, self._awaited = own, set()
                try:
                    yield
                finally:
                    self._owner = None

    def __deepcopy__(self, memo: Any) -> ForwardLock:
        return ForwardLock()

    def _wait(self, own: int) -> bool:
        """Wait until the lock is free; ``False`` if its owner waits for this thread."""
        if own in self._awaited:
            return False
        place, since, look = None, time.monotonic(), 0.0
        in_circle = False
        _wanted[own] = self
        try:
            while self._lock.locked():
                time.sleep(_POLL)
                now = time.monotonic()
                if now < look:
                    continue
                look = now + _LOOK
                was_in_circle, in_circle = in_circle, _leads_to(self._owner, own)
                if was_in_circle and in_circle:
                    return False
                if _place(self._owner) != place:
                    place, since = _place(self._owner), now
                elif now - since > (_WAITS if _is_waiting(self._owner) else _STANDS_STILL):
                    _say_awaited()
                    return False
        finally:
            _wanted.pop(own, None)
        return True

    def _leave_behind(self) -> None:
        """In the child of a fork, the thread that held the lock may not exist."""
        if self._owner != threading.get_ident():
            self._lock, self._owner = threading.Lock(), None
        self._awaited = set()


_all: weakref.WeakSet[ForwardLock] = weakref.WeakSet()
_wanted: dict[int, ForwardLock] = {}  # the lock that a thread waits for


def _leads_to(thread: int | None, goal: int) -> bool:
    """Whether a thread waits for a lock that ``goal`` holds, or for one whose owner does so."""
    passed = set()
    while thread is not None and thread not in passed:
        passed.add(thread)
        lock = _wanted.get(thread)
        thread = None if lock is None else lock._owner
        if thread == goal:
            return True
    return False


def _place(thread: int | None) -> Any:
    """Where a thread is in its Python code."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti)


def _is_waiting(thread: int | None) -> bool:
    """Whether a thread is in a function of Python that waits for other threads."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None or thread in _wanted:  # which waits for the lock of another model
        return False
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    return any(name in path for name in _WAITING)


@cache
def _say_awaited() -> None:
    logger.warning(
        "a thread is in a forward of a model with offloaded modules, and waits for another thread "
        "that runs the same model.  The other thread now goes on inside this forward.  To run such "
        "threads without this delay, set GEMMA4_COMPAT_OFFLOAD_THREADS=0."
    )


def _after_fork() -> None:
    _wanted.clear()
    for lock in list(_all):
        lock._leave_behind()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


#: The lock of each dispatched model.
_locks: weakref.WeakKeyDictionary[Any, ForwardLock] = weakref.WeakKeyDictionary()


def share_lock(root: Any) -> None:
    """Make the forwards of ``root`` and of the offloaded modules in it use the same lock."""
    offloaded = [module for module in root.modules() if offload_hook(module) is not None]
    if not offloaded:
        return
    # A thread may hold it while the model is dispatched again.
    lock = _locks.setdefault(root, ForwardLock())
    for module in (root, *offloaded):
        if vars(module).get("_hf_hook") is not None:
            setattr(module._hf_hook, _LOCK, lock)
            lock_forward(module)


def lock_forward(module: Any) -> None:
    """Make the forward of a module with a hook take the hook's lock."""
    from torch.compiler import is_compiling

    hooked = vars(module).get("forward")
    if hooked is None or hasattr(getattr(hooked, "func", None), "_is_locked"):
        return

    @wraps(getattr(hooked, "func", hooked))
    def new_forward(module: Any, hooked: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return hooked(*args, **kwargs)
        lock = attached(module._hf_hook, _LOCK, ForwardLock)
        if lock.is_held():
            return hooked(*args, **kwargs)
        with lock.held():
            try:
                return hooked(*args, **kwargs)
            except BaseException:
                if lock.is_held():  # and not a forward inside that of another thread
                    _finish(module)
                raise

    new_forward._is_locked = True  # type: ignore[attr-defined]
    module.forward = update_wrapper(partial(new_forward, module, hooked), module._old_forward)


def _finish(root: Any) -> None:
    """After a forward that raised, let accelerate's hooks take the weights away.

    Otherwise the next forward may get the copy of a tied weight instead: accelerate looks copies up
    by the address that the weight had when the model was dispatched, and a weight that is still on
    the device may have this address now.
    """
    for module in root.modules():
        hook = offload_hook(module)
        if hook is None or not hasattr(hook, "tied_pointers_to_remove"):  # no forward has begun
            continue
        weights = module._parameters.values()
        if any(weight is not None and not weight.is_meta for weight in weights):
            hook.post_forward(module, None)


def lock_of(module: Any) -> AbstractContextManager[None]:
    """The lock that the forward of this module takes; a ``nullcontext`` if it takes none."""
    hook = vars(module).get("_hf_hook")
    lock: ForwardLock | None = None if hook is None else vars(hook).get(_LOCK)
    return nullcontext() if lock is None else lock.held()
