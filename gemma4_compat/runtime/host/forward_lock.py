"""Lets threads that run the same model with offloaded modules take turns.

A module has its weights only during its forward, and one thread at a time may use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper, wraps
from itertools import takewhile
from typing import Any

from ...errors import DeadlockError
from ...model.hooks import offload_hook
from ...objects import ForkableLock, NotCopied, attached

_LOCK = "_forward_lock"  # an attribute of the hook

#: Seconds that a thread waits, before it looks what the other one does.
_PATIENCE = 1.0
#: So many times it may find the same forward, in which a module has its weights.
_HOPELESS = 300


class ForwardLock(NotCopied):
    """The two locks of a model.  The hooks of a deep-copied model share new ones.

    A thread holds ``weights`` while a module has its weights, which may come from a slow disk.
    Results are right because of this lock alone, so no thread goes on without it.

    A thread holds ``turn`` during a forward of the model.  This saves time: no other thread needs
    other layers meanwhile.  In a hook, it may wait for threads that run the same model.  So they go
    on without a turn when no module has run for a while.
    """

    def __init__(self) -> None:
        self.turn, self.weights = ForkableLock(), ForkableLock()
        self.module: Any = None  # which has its weights; the lock itself in ``lock_of``
        self.count = 0  # of the forwards in which modules had them
        self.passed = False  # the thread with the turn seems to wait for others

    def __deepcopy__(self, memo: Any) -> ForwardLock:
        return ForwardLock()

    @contextmanager
    def in_turn(self, most: int = 1) -> Iterator[None]:
        """A block for a forward of the model; without a turn after so many attempts."""
        attempts = takewhile(lambda _: most > 1 or not self.passed, self._attempts(most))
        with held(self.turn.now, attempts) as has_turn:
            self.passed = not has_turn
            yield

    @contextmanager
    def using(self, module: Any) -> Iterator[None]:
        """A block in which a module has its weights."""
        outer = self.module if self.weights.now._is_owned() else None
        with held(self.weights.now, self._attempts_or_error()):
            self.module, self.count = module, self.count + 1
            try:
                yield
            finally:
                self.module = outer

    def _attempts(self, most: int) -> Iterator[float]:
        """Attempts to get a lock: so many in which nothing changes that other threads do."""
        before, same = -1, 0
        while same < most:
            yield _PATIENCE
            same = same + 1 if before == self.count and not _cannot_wait(self.module) else 0
            before = self.count

    def _attempts_or_error(self) -> Iterator[float]:
        yield from self._attempts(_HOPELESS)
        raise DeadlockError(
            f"the forward of a {type(self.module).__name__} in another thread has used its weights "
            f"for {_HOPELESS * _PATIENCE:.0f} s, and may wait for this thread, which runs the same "
            "model.  Wait outside of that forward, for example in a forward hook.  Or set "
            "GEMMA4_COMPAT_OFFLOAD_THREADS=0, if no two threads run the same module."
        )


@contextmanager
def held(lock: Any, attempts: Iterator[float]) -> Iterator[bool]:
    """A block that holds an ``RLock``; ``False`` after attempts of so many seconds each."""
    nested = lock._is_owned()
    try:
        if nested:
            yield True
        elif lock.acquire(False) or any(lock.acquire(timeout=each) for each in attempts):
            with lock:  # no interrupt can leave it held
                lock.release()
                yield True
        else:
            yield False
    finally:
        if not nested and lock._is_owned():
            lock.release()


def _cannot_wait(module: Any) -> bool:
    """Whether weights are loaded, or used by code of this package: neither needs a thread."""
    if module is None or isinstance(module, ForwardLock):
        return module is not None
    hook = offload_hook(module)
    return hook is not None and any(weight.is_meta for weight in _weights(hook, module))


#: The lock of each dispatched model.
_locks: weakref.WeakKeyDictionary[Any, ForwardLock] = weakref.WeakKeyDictionary()


def share_lock(root: Any) -> None:
    """Make the forwards of ``root`` and of the offloaded modules in it use the same lock."""
    offloaded = [module for module in root.modules() if offload_hook(module) is not None]
    for module in (root, *offloaded) if offloaded else ():
        if vars(module).get("_hf_hook") is not None:
            # A thread may hold the lock while the model is dispatched again.
            setattr(module._hf_hook, _LOCK, _locks.setdefault(root, ForwardLock()))
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
        lock, hook = attached(module._hf_hook, _LOCK, ForwardLock), offload_hook(module)
        if hook is None or not _loads(hook, module):
            with lock.in_turn():
                return hooked(*args, **kwargs)
        with lock.using(module):
            try:
                return hooked(*args, **kwargs)
            except BaseException:
                # A weight that stays may have the address that a tied weight had when the model was
                # dispatched.  Then accelerate uses it instead in the next forward.
                if not all(weight.is_meta for weight in _weights(hook, module)):
                    hook.post_forward(module, None)
                raise

    new_forward._is_locked = True  # type: ignore[attr-defined]
    module.forward = update_wrapper(partial(new_forward, module, hooked), module._old_forward)


def _loads(hook: Any, module: Any) -> bool:
    """Whether a hook has something to load before a forward of the module."""
    own = any(weight is not None for weight in module._parameters.values())
    return own or hook.place_submodules or hook.offload_buffers


def _weights(hook: Any, module: Any) -> Iterator[Any]:
    """The parameters that a hook loads before a forward of the module."""
    return module.parameters(recurse=hook.place_submodules)  # type: ignore[no-any-return]


@contextmanager
def lock_of(module: Any, *, turn: int = 1, weights: bool = True) -> Iterator[None]:
    """A block in which other threads run no forward of the model, and use no weights of it.

    It begins without a turn after so many attempts.  Without ``weights``, threads may use them that
    this one waits for.
    """
    lock = getattr(vars(module).get("_hf_hook"), _LOCK, None)
    first = lock.in_turn(turn) if lock is not None and turn else nullcontext()
    with first, lock.using(lock) if lock is not None and weights else nullcontext():
        yield
