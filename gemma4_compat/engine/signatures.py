"""Functions in place of others, and whether one accepts all calls of another."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD

#: The replacements made by ``calling``, and the function that each calls.
_called: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A factory of closures that call ``function`` with the original and their own arguments."""

    def factory(original: Any) -> Any:
        code = getattr(original, "__code__", None)
        call = _like(original, function) if isinstance(code, types.CodeType) else None

        def any_call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        new = wraps(original)(call or any_call)
        _called[new] = function
        return new

    return factory


def _like(original: Any, function: Callable[..., Any]) -> Any:
    """A function with the parameters, defaults and globals of ``original``.

    Code of users may read these from the function itself, for example ``__code__.co_varnames``.
    """
    code, bare = original.__code__, _bare_signature(original)
    every = bare.parameters.values()
    first = [each.name for each in every if each.kind in _BY_POSITION]
    named = [each.name for each in every if each.kind is inspect.Parameter.KEYWORD_ONLY]
    more = [f"*{each.name}" for each in every if each.kind is _ARGS]
    rest = [f"**{each.name}" for each in every if each.kind is _KWARGS]
    # What ``function`` does not name is passed by name, because it may look there.
    own = list(inspect.signature(function).parameters)[1:]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, own, strict=False))
    count = len(first) if more else max(code.co_posonlyargcount, len(list(same)), 1)
    by_name = [*first[count:], *named]
    values = {each.name: each.default for each in every if each.default is not each.empty}
    values = {name: value for name, value in values.items() if name in by_name}
    arguments = [*first[:count], *more, *(f"{n}={n}" for n in by_name if n not in values)]
    inner, outer, given, usual = "_function", "_original", "_given", "_usual"
    while {inner, outer, given, usual} & {*code.co_varnames}:
        inner, outer, given, usual = (f"_{each}" for each in (inner, outer, given, usual))
    call = f"{inner}({', '.join([outer, *arguments, f'**{given}', *rest])})"
    plain = (each if each.default is each.empty else each.replace(default=0) for each in every)
    signature = bare.replace(parameters=list(plain))
    # A default is left out, as it was in the call: ``function`` may ask what was passed.
    lines = [
        f"def make({inner}, {outer}, {usual}):",
        f" def f{signature}:",
        f"  {given} = {{}}",
        *(f"  if {n} is not {usual}[{n!r}]: {given}[{n!r}] = {n}" for n in values),
        f"  return {call}",
        " return f",
    ]
    source = "\n".join(lines)
    namespace: dict[str, Any] = {}
    exec(compile(source, function.__code__.co_filename, "exec", dont_inherit=True), namespace)
    made = namespace["make"](function, original, values)
    line = function.__code__.co_firstlineno
    own_code = made.__code__.replace(co_firstlineno=line, co_name=code.co_name)
    new = types.FunctionType(own_code, original.__globals__, closure=made.__closure__)
    new.__defaults__, new.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return new


def own_signature(new: Any) -> inspect.Signature:
    """What a replacement accepts, without ``functools.wraps``."""
    if new in _called:
        signature = inspect.signature(_called[new])
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return _bare_signature(new)


def _bare_signature(function: Any) -> inspect.Signature:
    """The parameters in a function's own code, without annotations."""
    closure = function.__closure__
    bare = types.FunctionType(function.__code__, {}, None, function.__defaults__, closure)
    bare.__kwdefaults__ = function.__kwdefaults__
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
