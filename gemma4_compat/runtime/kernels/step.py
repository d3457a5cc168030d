"""The decode step that a thread captures.

In such a step, functions of this package run in place of the forwards of some modules.  Only the
thread of the step calls them: in other threads the forwards run as usual.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ...objects import shadowed

#: A module, and a function that is called with the module's forward and the arguments of a call.
Call = tuple[Any, Callable[..., Any]]

_thread = threading.local()  # .forwards: those of the step that this thread runs, by module


@contextmanager
def in_step(calls: Iterable[Call]) -> Iterator[None]:
    """In this context, this thread runs a step, with these functions in place of forwards."""
    outside, forwards = getattr(_thread, "forwards", {}), {}
    with ExitStack() as stack:
        stack.callback(setattr, _thread, "forwards", outside)  # which no interrupt can prevent
        for module, function in calls:
            slot = _slot(module)
            if slot is None:
                continue
            stand_in = _StandIn(module, slot[1])
            stack.enter_context(shadowed(module, **{slot[0]: stand_in}))
            forwards[module] = partial(function, stand_in.usual)
        _thread.forwards = forwards
        yield


def has_own_forward(module: Any) -> bool:
    """Whether a module has the forward of its class, so that ``in_step`` can replace it."""
    return _slot(module) is not None


def without_stand_ins(own: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module as they are outside of steps, which other threads may run."""
    usual = dict(own)  # another thread may change them
    for name in ("forward", "_old_forward"):
        if isinstance(usual.get(name), _StandIn):
            before = usual.pop(name).before
            if before is not None:
                usual[name] = before
    return usual


def is_short_of_memory(error: BaseException) -> bool:
    """Whether memory was short, which may pass."""
    text = f"{type(error).__name__}: {error}"
    short = "out of memory|MemoryError|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED"
    return re.search(short, text) is not None


class _StandIn:
    """The value of a module's forward during steps.  Copies of the module get its own forward."""

    def __init__(self, module: Any, before: Any) -> None:
        self.module, self.before = module, before  # None: the class's forward applied
        self.usual = type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(_thread, "forwards", {}).get(self.module, self.usual)
        return forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # before the copy has attributes


def _slot(module: Any) -> tuple[str, Any] | None:
    """The name and value of the attribute for a module's forward; ``None`` if it is a user's."""
    own = vars(module)
    # accelerate's hooks keep the module's own forward in ``_old_forward``.
    name = "_old_forward" if "_old_forward" in own else "forward"
    value = own.get(name)
    if isinstance(value, _StandIn):
        value = value.before
    if value is not None and getattr(value, "__func__", None) is not type(module).forward:
        return None
    return name, value
