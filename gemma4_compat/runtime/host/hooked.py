"""Fetches the weights of Gemma's offloaded modules in other ways than accelerate.

A hook of a dispatched model of Gemma 4 or 3n gets methods of its own, which try these ways first.
The hooks of other models stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

from ...model.hooks import offload_hook, offload_hooks
from ...model.parts import MODELS

#: The ways in use, in the order of their names.
_ways: tuple[Way, ...] = ()
#: Hook -> the ways that were in use when the forward of its module began.
_begun: weakref.WeakKeyDictionary[Any, tuple[Way, ...]] = weakref.WeakKeyDictionary()


class Way:
    """How the weights of some offloaded modules get to their execution device, and back.

    ``pre_forward`` and ``post_forward`` get accelerate's method of this name, or the next way's,
    and then the arguments of a call.
    """

    name = ""  # of the patch

    def add(self, hook: Any, module: Any) -> None:
        """Prepare an offloaded module, after the dispatch of its model."""

    def pre_forward(self, original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return original(hook, module, *args, **kwargs)

    def post_forward(self, original: Any, hook: Any, module: Any, output: Any) -> Any:
        return original(hook, module, output)

    def at_work(self, hooks: list[Any]) -> str | None:
        """What this way does with the modules of these hooks, as text; ``None`` for nothing."""

    def dispatched(self, root: Any) -> None:
        """Use this way for the offloaded modules of a model of Gemma 4 or 3n."""
        modules = list(root.modules())
        if not any(type(module).__module__.startswith(MODELS) for module in modules):
            return
        for module in modules:
            hook = offload_hook(module)
            if hook is not None:
                self.add(hook, module)
                for function in (pre_forward, post_forward):
                    setattr(hook, function.__name__, MethodType(function, hook))

    def start(self) -> None:
        """Use this way, also for the models that were dispatched before ``stop``."""
        global _ways
        _ways = tuple(sorted({*_ways, self}, key=lambda way: way.name))

    def stop(self) -> None:
        """Use this way no longer.  A forward that has begun ends as it began."""
        global _ways
        _ways = tuple(way for way in _ways if way is not self)


def at_work(model: Any) -> dict[str, str]:
    """What makes a model's offloaded modules faster: the name of a patch -> what it does.

    Args:
        model: a ``torch.nn.Module``; nothing is moved or loaded.
    """
    hooks = list(offload_hooks(model.modules()))
    texts = {way.name: way.at_work(hooks) for way in _ways}
    return {name: text for name, text in texts.items() if text is not None}


# A pickle of a bound method has its name, and so becomes accelerate's own method when it is read.
def pre_forward(hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    return _outermost(hook, "pre_forward")(hook, module, *args, **kwargs)


def post_forward(hook: Any, module: Any, output: Any) -> Any:
    return _outermost(hook, "post_forward")(hook, module, output)


def _outermost(hook: Any, name: str) -> Any:
    import torch

    method = getattr(type(hook), name)
    if torch.compiler.is_compiling():
        return method
    ways = _begun.pop(hook, _ways)
    if name == "pre_forward":
        ways = _begun[hook] = _ways
    for way in ways:
        method = partial(getattr(way, name), method)
    return method


class AfterForward:
    """A forward hook that also runs after errors, for which accelerate calls no ``post_forward``.

    A copy and a pickle do nothing.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function  # gets the module

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.function(module)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")

    def attach(self, module: Any) -> None:
        """Register this hook with a module, in place of an earlier one."""
        for key, hook in module._forward_hooks.items():
            if isinstance(hook, AfterForward):
                module._forward_hooks[key] = self
                return
        module.register_forward_hook(self, always_call=True)
