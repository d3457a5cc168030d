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

from ...model.hooks import offload_hook
from ...model.parts import MODELS
from ...objects import NotCopied

_BEGUN = "_ways"  # an attribute of a hook during a forward: the ways at its begin
#: The hooks with methods of their own.
_hooks: weakref.WeakSet[Any] = weakref.WeakSet()


class Ways(NotCopied, tuple["Way", ...]):
    """The ways in use, in the order of their names."""


_ways = Ways()


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
                _hooks.add(hook)
                _set_methods(hook)

    def start(self) -> None:
        """Use this way, also for the models that were dispatched before ``stop``."""
        _use(*_ways, self)
        for hook in list(_hooks):
            _set_methods(hook)

    def stop(self) -> None:
        """Use this way no longer; without any, the hooks have accelerate's methods again.

        A forward that has begun ends as it began.
        """
        _use(*(way for way in _ways if way is not self))
        for hook in list(_hooks):
            _clear_methods(hook)


def _use(*ways: Way) -> None:
    global _ways
    _ways = Ways(sorted(set(ways), key=lambda way: way.name))


def at_work(model: Any) -> dict[str, str]:
    """What makes a model's offloaded modules faster: the name of a patch -> what it does.

    Args:
        model: a ``torch.nn.Module``; nothing is moved or loaded.
    """
    found = (offload_hook(module) for module in model.modules())
    hooks = [hook for hook in found if hook is not None and hook in _hooks]
    texts = {way.name: way.at_work(hooks) for way in _ways}
    return {name: text for name, text in texts.items() if text is not None}


def pre_forward(hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    ways = vars(hook)[_BEGUN] = _ways
    return _outermost(ways, hook, "pre_forward")(hook, module, *args, **kwargs)


def post_forward(hook: Any, module: Any, output: Any) -> Any:
    ways = vars(hook).pop(_BEGUN, None)  # ``None`` in a copy
    _clear_methods(hook)
    return _outermost(_ways if ways is None else ways, hook, "post_forward")(hook, module, output)


#: A pickle of a bound method has its name, and so becomes accelerate's own method when it is read.
_METHODS: dict[str, Callable[..., Any]] = {"pre_forward": pre_forward, "post_forward": post_forward}


def _outermost(ways: Ways, hook: Any, name: str) -> Any:
    import torch

    method = getattr(type(hook), name)
    if torch.compiler.is_compiling():
        return method
    for way in ways:
        method = partial(getattr(way, name), method)
    return method


def _set_methods(hook: Any) -> None:
    for name, function in _METHODS.items():
        setattr(hook, name, MethodType(function, hook))


def _clear_methods(hook: Any) -> None:
    """Give a hook accelerate's methods again, if no way is in use and no forward has begun."""
    if not _ways and _BEGUN not in vars(hook):
        for name in _METHODS:
            vars(hook).pop(name, None)


class AfterForward:
    """A forward hook that also runs after errors, for which accelerate calls no ``post_forward``.

    It is pickled as a hook that does nothing.
    """

    def __init__(
        self, raised: Callable[[Any], None], ended: Callable[[Any], None] | None = None
    ) -> None:
        self.raised, self.ended = raised, ended  # both get the module

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if output is None:  # torch has no output to pass
            self.raised(module)
        elif self.ended is not None:
            import torch

            if not torch.compiler.is_compiling():
                self.ended(module)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> AfterForward:
        return AfterForward(self.raised)

    def attach(self, module: Any) -> None:
        """Register this hook with a module, once."""
        for key, hook in module._forward_hooks.items():
            if getattr(hook, "raised", None) == self.raised:
                module._forward_hooks[key] = self
                return
        module.register_forward_hook(self, always_call=True)
