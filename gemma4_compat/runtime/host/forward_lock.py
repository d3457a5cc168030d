"""Lets threads that run the same model with offloaded modules take turns.

A module has its weights only during its forward, and one thread at a time may use them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper, wraps
from typing import Any

from ...errors import DeadlockError
from ...model.hooks import offload_hook
from ...objects import ForkableLock, NotCopied, attached
from .table import has_known_forward

_LOCK = "_forward_lock"  # an attribute of the hook

#: Seconds that a thread waits, before it looks whether the thread with the turn still runs modules.
_PATIENCE = 1.0
#: Seconds after which a forward of a user's code, in which a module has its weights, never ends.
_HOPELESS = 300.0


class _Lock(ForkableLock):
    """A re-entrant lock that tells who holds it: the thread, and the module that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.holder: tuple[Any, ...] = None, None  # a new tuple at each begin and end

    @contextmanager
    def held(self, module: Any, attempts: Callable[[], Iterator[float]]) -> Iterator[bool]:
        """A block that holds the lock; ``False`` after attempts of so many seconds each."""
        lock = self.now
        nested = lock._is_owned()
        try:
            if nested or lock.acquire(False) or any(lock.acquire(timeout=s) for s in attempts()):
                with lock:  # no interrupt can leave it held
                    if not nested:
                        lock.release()
                    outer = self.holder if nested else (None, None)
                    self.holder = threading.get_ident(), module
                    try:
                        yield True
                    finally:
                        self.holder = (*outer,)
            else:
                yield False
        finally:
            if not nested and lock._is_owned():
                lock.release()


class ForwardLock(NotCopied):
    """The two locks of a model.  The hooks of a deep-copied model share new ones.

    A thread holds ``weights`` while a module has its weights, which may come from a slow disk.
    Results are right because of this lock alone, so no thread goes on without it.

    A thread holds ``turn`` during a forward of the model.  This saves time: no other thread needs
    other layers meanwhile.  In a hook, it may wait for a thread that runs the same model.  So when
    no module has run for a while, that thread goes on without a turn.
    """

    def __init__(self) -> None:
        self.turn, self.weights = _Lock(), _Lock()
        self.thread = threading.local()  # .passed: the holder of the turn that it does not wait for

    def __deepcopy__(self, memo: Any) -> ForwardLock:
        return ForwardLock()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """A block for a forward of the model."""
        if getattr(self.thread, "passed", None) is self.turn.holder:
            yield
            return
        with self.turn.held(None, self._modules_run) as has_turn:
            self.thread.passed = None if has_turn else self.turn.holder
            yield

    def using(self, module: Any) -> AbstractContextManager[bool]:
        """A block in which a module has its weights."""
        return self.weights.held(module, self._forward_may_end)

    def _modules_run(self) -> Iterator[float]:
        before: tuple[Any, ...] | None = None
        while (now := self.weights.holder) is not before or (
            now[0] == self.turn.holder[0] and not _may_wait(now[1])
        ):
            before = now
            yield _PATIENCE

    def _forward_may_end(self) -> Iterator[float]:
        before, since = None, 0.0
        while True:
            if self.weights.holder is not before:
                before, since = self.weights.holder, time.monotonic()
            elif time.monotonic() - since > _HOPELESS and _may_wait(before[1]):
                raise DeadlockError(
                    f"the forward of a {type(before[1]).__name__} in another thread has used its "
                    f"weights for {_HOPELESS:.0f} s, and may wait for this thread, which runs the "
                    "same model.  Wait outside of that forward, for example in a forward hook.  Or "
                    "set GEMMA4_COMPAT_OFFLOAD_THREADS=0, if no two threads run the same module."
                )
            yield _PATIENCE


def _may_wait(module: Any) -> bool:
    """Whether the forward of a module runs code of users, which may wait for other threads."""
    hook = None if module is None else offload_hook(module)
    if hook is None or any(w.is_meta for w in module.parameters(recurse=hook.place_submodules)):
        return False  # its weights are read from the disk
    return next(module.children(), None) is not None or not has_known_forward(module)


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
        hook = offload_hook(module)
        if hook is not None and not _loads(hook, module):
            return hooked(*args, **kwargs)
        with lock.in_turn() if hook is None else lock.using(module):
            try:
                return hooked(*args, **kwargs)
            except BaseException:
                with lock.using(None):
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


def _loads(hook: Any, module: Any) -> bool:
    """Whether a hook has something to load before a forward of the module."""
    own = any(weight is not None for weight in module._parameters.values())
    return own or hook.place_submodules or hook.offload_buffers


@contextmanager
def lock_of(module: Any, *, turn: bool = True, weights: bool = True) -> Iterator[None]:
    """A block in which other threads run no forward of the model, and use no weights of it.

    Without ``weights``, threads may do so that this one waits for.
    """
    hook = vars(module).get("_hf_hook")
    lock = None if hook is None else vars(hook).get(_LOCK)
    first = lock.in_turn() if lock is not None and turn else nullcontext()
    with first, lock.using(None) if lock is not None and weights else nullcontext():
        yield
