"""The output of a forward whose logits are computed when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

from .logits import LazyLogits

#: of this thread: .in_ddp: whether DDP looks at an output; .stays_lazy: see ``staying_lazy``
_now = threading.local()


class LazyOutput:
    """A base of a ``ModelOutput`` whose field ``logits`` is computed when it is first read."""

    #: the fields that accelerate's hooks leave where they are
    _kept: Any = ()

    def __post_init__(self) -> None:
        with staying_lazy():
            super().__post_init__()  # type: ignore[misc]

    @property
    def logits(self) -> Any:
        value = vars(self).get("logits")
        if isinstance(value, LazyLogits) and not getattr(_now, "stays_lazy", False):
            value = self.logits = value.read()
        return value

    @logits.setter
    def logits(self, value: Any) -> None:
        vars(self)["logits"] = value

    @logits.deleter
    def logits(self) -> None:
        del vars(self)["logits"]

    def __getitem__(self: Any, key: Any) -> Any:
        names = list(self.keys())
        if isinstance(key, slice):
            return tuple(getattr(self, name) for name in names[key])
        if not isinstance(key, str):
            return getattr(self, names[key])
        key = self._name_of(key)
        if key not in names:
            raise KeyError(key)
        return getattr(self, key)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return self[key] if self._name_of(key) in self.keys() else default

    def _name_of(self: Any, key: Any) -> Any:
        """The name of a field; transformers 5.24 has renamed some, and knows the old names."""
        renamed = getattr(self, "_replace_old_cache_name", None)
        return key if renamed is None else renamed(key)

    def items(self: Any) -> Any:
        return {name: getattr(self, name) for name in self.keys()}.items()

    def values(self: Any) -> Any:
        if getattr(_now, "in_ddp", False):
            return [vars(self)[name] for name in self.keys()]
        return dict(self.items()).values()

    def __reduce__(self: Any) -> Any:
        """Copies and pickles are upstream's outputs."""
        base = type(self).__mro__[2]
        return base, tuple(getattr(self, each.name) for each in fields(self))

    def mapped(self: Any, function: Callable[[Any], Any], kept: Any = ()) -> Any:
        """The output with other values; the logits stay lazy."""
        values = {each.name: vars(self).get(each.name) for each in fields(self)}
        output = type(self)(**{n: v if n in kept else function(v) for n, v in values.items()})
        output._kept = self._kept
        return output

    def to(self: Any, device: Any, **kwargs: Any) -> Any:
        """accelerate's hooks call it to send an output to the device of the input."""
        from accelerate.utils import send_to_device

        return self.mapped(partial(send_to_device, device=device, **kwargs), self._kept)


@lru_cache
def lazy(kind: Any) -> Any:
    return type(kind.__name__, (LazyOutput, kind), {"__module__": kind.__module__})


def in_float32(convert: Callable[[Any], Any], value: Any) -> Any:
    """The value of accelerate's ``convert_to_fp32``, which is ``convert``."""
    if not isinstance(value, LazyOutput):
        return convert(value)
    return value.mapped(lambda each: each.float() if type(each) is LazyLogits else convert(each))


def in_ddp(original: Callable[[Any], Any], value: Any) -> Any:
    """What DDP's functions return for the output of a forward; they need no logits."""
    if not isinstance(value, LazyOutput):
        return original(value)
    _now.in_ddp = True
    try:
        return original(value)
    finally:
        _now.in_ddp = False


@contextmanager
def staying_lazy(is_lazy: bool = True) -> Iterator[None]:
    """A block in which this thread reads ``outputs.logits`` without computing them."""
    outer, _now.stays_lazy = getattr(_now, "stays_lazy", False), is_lazy
    try:
        yield
    finally:
        _now.stays_lazy = outer
