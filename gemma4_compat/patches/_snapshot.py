"""Whether a model is still what it was: the same modules, tensors at the same addresses, settings.

A CUDA graph repeats kernels on addresses.  It does not see a replaced weight, another active
adapter, or a changed scaling.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from operator import is_, itemgetter
from typing import Any

from ..model.hooks import offload_hook
from ._streaming import streamed_tensors

#: compared by value
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
#: of ``vars(module)``: what is compared otherwise, what no forward reads, what ``generate`` writes
_LEFT_OUT = frozenset(
    {
        "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "generation_config", "prepare_inputs_for_generation", "_cache",
        "_previous_max_cache_length", "_compiled_call", "_last_compile_config", "_decoding",
    }
)  # fmt: skip


class Snapshot:
    """What a forward of these modules depends on, besides the values of tensors.

    Args:
        modules: ``nn.Module`` objects; those in them are not looked into.
        others: objects with settings, say a config.
    """

    def __init__(self, modules: Iterable[Any], others: Iterable[Any] = ()) -> None:
        self._modules = [_Module(module) for module in modules]
        self._others = [(each, _frozen(vars(each))) for each in others]

    def change(self) -> str | None:
        """What is not as it was, for people; ``None`` if nothing changed."""
        for module in self._modules:
            change = module.change()
            if change is not None:
                return change
        for each, frozen in self._others:
            if not _same(_frozen(vars(each)), frozen):
                return f"a setting of {type(each).__name__}"
        return None


class _Module:
    """One module.  It is not kept alive, nor are its tensors.

    Thousands of these are compared before a generation: hence the fast paths.
    """

    __slots__ = (
        "children", "containers", "count", "get", "module", "names", "tensors", "values",
    )  # fmt: skip

    def __init__(self, module: Any) -> None:
        own = vars(module)
        self.module = weakref.ref(module)
        self.names = _names(own)
        self.get = itemgetter(*self.names)  # several: there are always the hooks
        self.values = self.get(own)
        self.count = len(own)
        self.containers = [
            (number, _flat(value), _frozen(value))
            for number, value in enumerate(self.values)
            if isinstance(value, _CONTAINERS)
        ]
        self.children = [weakref.ref(child) for child in _present(own["_modules"])]
        self.tensors = [
            (weakref.ref(tensor), tensor.data_ptr(), tuple(_state_addresses(tensor)))
            for tensor in _tensors(module)
        ]

    def change(self) -> str | None:
        module = self.module()
        if module is None:
            return "a module that is gone"
        own = vars(module)
        what = self._changed_setting(own) or self._changed_tensor(_tensors(module))
        if what is None and not self._children_hold(own):
            what = "modules"
        return None if what is None else f"{what} of a {type(module).__name__}"

    def _changed_setting(self, own: Any) -> str | None:
        if len(own) != self.count and _names(own) != self.names:
            return "attributes"
        try:
            values = self.get(own)
        except KeyError as error:
            return str(error)
        if not all(map(is_, values, self.values)):
            for name, ours, theirs in zip(self.names, values, self.values, strict=True):
                if not _same(ours, theirs):
                    return name
        for number, flat, frozen in self.containers:
            value = values[number]
            if not value and not frozen:
                continue
            if flat is not None and len(flat) == len(value):
                held = value.values() if isinstance(value, dict) else value
                if all(map(is_, held, flat)):
                    continue
            if not _same(_frozen(value), frozen):
                return self.names[number]
        return None

    def _children_hold(self, own: Any) -> bool:
        children = _present(own["_modules"])
        return len(children) == len(self.children) and all(
            ref() is child for ref, child in zip(self.children, children, strict=True)
        )

    def _changed_tensor(self, tensors: list[Any]) -> str | None:
        if len(tensors) != len(self.tensors):
            return "tensors"
        for (ref, pointer, state), tensor in zip(self.tensors, tensors, strict=True):
            same = ref() is tensor
            if not same or tensor.data_ptr() != pointer:
                return "a tensor"
            if state and tuple(_state_addresses(tensor)) != state:
                return "the statistics of a quantised weight"
        return None


def own_tensors(module: Any) -> list[Any]:
    """The parameters and buffers of a module, without those of modules in it."""
    return _present(module._parameters) + _present(module._buffers)


def _names(own: Any) -> tuple[str, ...]:
    return tuple(name for name in own if name not in _LEFT_OUT)


def _present(entries: Any) -> list[Any]:
    return [value for value in entries.values() if value is not None]


def _tensors(module: Any) -> list[Any]:
    """Its own, and those that it gets copies of."""
    own = vars(module)
    hook = offload_hook(module) if "_hf_hook" in own else None
    if hook is None:
        return own_tensors(module)
    streamed = streamed_tensors(hook)
    # An offloaded embedding has others for the time of a lookup.
    return own_tensors(module) + streamed if streamed else _present(own["_buffers"])


def _state_addresses(tensor: Any) -> Iterator[int]:
    """Where the statistics of a quantised tensor are."""
    for name in ("quant_state", "CB", "SCB"):
        held = getattr(tensor, name, None)
        if held is not None:
            yield from _addresses_in(held)


def _addresses_in(held: Any) -> Iterator[int]:
    if hasattr(held, "data_ptr"):
        yield held.data_ptr()
        return
    for name, value in vars(held).items():
        if hasattr(value, "data_ptr"):
            yield value.data_ptr()
        elif name == "state2" and value is not None:  # the statistics are quantised too
            yield from _addresses_in(value)


def _flat(container: Any) -> Any | None:
    """The values of a dict or the items of a list, if there are no containers among them."""
    values = tuple(container.values()) if isinstance(container, dict) else tuple(container)
    return None if any(isinstance(value, _CONTAINERS) for value in values) else values


def _frozen(container: Any) -> tuple[Any, ...]:
    """The contents of a dict, list or set, and of those in it."""
    entries = container
    if isinstance(container, dict):
        entries = (each for item in container.items() for each in item)
    return tuple(_frozen(each) if isinstance(each, _CONTAINERS) else each for each in entries)


def _same(ours: Any, theirs: Any) -> bool:
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, _CONTAINERS):
        ours, theirs = _frozen(ours), _frozen(theirs)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    # Bound methods are made anew at each access.
    return (isinstance(ours, _PLAIN) or callable(ours)) and bool(ours == theirs)
