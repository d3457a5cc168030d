"""Functions in place of others, and whether one accepts all calls of another."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A factory of closures that call ``function`` with the original and their own arguments."""

    def factory(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return factory


def own_signature(new: Any) -> inspect.Signature:
    """What a replacement accepts, without ``functools.wraps``."""
    if new.__globals__ is globals():  # made by ``calling``
        signature = inspect.signature(inspect.getclosurevars(new).nonlocals["function"])
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    bare = types.FunctionType(new.__code__, {}, None, new.__defaults__, new.__closure__)
    bare.__kwdefaults__ = new.__kwdefaults__
    return inspect.signature(bare)


def takes_all_calls_of(original: Any, new: Any) -> bool:
    """Whether ``new`` accepts every call of the original, and binds arguments to the same names.

    Arguments that another library's wrapper takes as ``*args`` cannot be checked.
    """
    ours = own_signature(new)
    every = inspect.signature(original).parameters.values()
    named = [p for p in every if p.kind not in (_ARGS, _KWARGS)]
    names = [p.name for p in named]
    bind = ours.bind if _ARGS not in [p.kind for p in every] else ours.bind_partial
    required = [p for p in named if p.default is p.empty]
    for parameters, by_position in ((every, (0, 1, _ARGS)), (every, (0,)), (required, (0,))):
        # Pass the name of each parameter as its argument.
        args = [p.name for p in parameters if p.kind in by_position]
        kwargs = {p.name: p.name for p in parameters if p.name not in args and p.kind is not _ARGS}
        try:
            bound = bind(*args, **kwargs).arguments
        except TypeError:
            return False
        if any(value in names and value != name for name, value in bound.items()):
            return False
    return True
