"""Detects changes of a model's modules, tensor addresses, settings and code.

A CUDA graph repeats kernels on fixed addresses.  It does not notice a replaced weight, another
active adapter, a changed scaling, or another forward of a class.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any

from ...model.hooks import offload_hook
from ...model.tensors import address, own_tensors, present
from ..host.blocks import streamed_tensors
from ..kernels.watch import Use, wrapped_by

#: Compared by value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ADAPTER = "_disable_adapters"  # attribute of PEFT's layers
CONTAINERS = (dict, list, tuple, set, frozenset)
NUMBERS = 8  # elements of a tensor on the CPU, which are compared by value
#: Attributes in ``vars(module)`` that are compared elsewhere, that no forward reads, or that
#: ``generate`` writes.
LEFT_OUT = frozenset(
    {
        "_parameters", "_buffers", "_non_persistent_buffers_set",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "generation_config", "prepare_inputs_for_generation", "_cache",
        "_previous_max_cache_length", "_compiled_call", "_last_compile_config", "_decoding",
    }
)  # fmt: skip


class OwnHook:
    """A forward pre-hook of one thread during one forward, which is no change of the model.

    A copy and a pickle do nothing.
    """

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.thread = get_ident()

    def __call__(self, _: Any, inputs: Any) -> None:
        if get_ident() == self.thread:
            self.inputs.append(inputs[0])

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class Snapshot:
    """All that a forward of these modules depends on, except the values of tensors.

    Args:
        modules: ``nn.Module`` objects; their submodules are not included.
        others: objects with settings, such as a config.
    """

    def __init__(self, modules: Iterable[Any], others: Iterable[Any] = ()) -> None:
        modules = list(modules)
        self.modules = [_Module(module) for module in modules]
        self._by_id = {id(module): own for module, own in zip(modules, self.modules, strict=True)}
        adapted = [self._by_id[id(module)] for module in modules if _ADAPTER in vars(module)]
        self._ends = adapted[:1] + adapted[-1:]  # PEFT switches one layer after the other
        bases = {base for module in modules for base in type(module).__mro__[:-1]}
        self.classes = [(vars(base), len(vars(base)), base.__name__) for base in bases]
        #: by owner and name
        self.code: dict[tuple[int, str], Use] = {
            (id(base), name): (vars(base), name, value, base.__name__)
            for base in bases
            for name, value in vars(base).items()
            if name not in ("__dict__", "__weakref__")
        }
        self.bodies = list(_bodies(self.code))
        self.others = [(other, _frozen(vars(other))) for other in others]

    def add(self, uses: dict[tuple[int, str], Use]) -> None:
        """Compare what the functions of a step are and call, too."""
        self.code = {**uses, **self.code}
        self.bodies = list(_bodies(self.code))

    def objects(self) -> list[Any]:
        """The modules that still exist, and the other objects with settings."""
        modules = (own.module() for own in self.modules)
        return [*(each for each in modules if each is not None), *(each for each, _ in self.others)]

    def has_same_adapter(self) -> bool:
        """Whether the same adapters are active and merged, which is quick to see."""
        return all(module.change() is None for module in self._ends)

    def is_changed(self, frame: FrameType) -> bool:
        """Whether this begins the forward of a module that is not as it was."""
        is_forward = frame.f_code.co_name == "_call_impl"
        own = self._by_id.get(id(frame.f_locals.get("self"))) if is_forward else None
        return own is not None and own.change() is not None

    def change(self, with_settings: bool = True) -> str | None:
        """What changed since, for a log message; ``None`` if nothing changed.

        ``generate`` has settings of its own during a call.
        """
        for module in self.modules:
            change = module.change()
            if change is not None:
                return change
        for other, frozen in self.others if with_settings else ():
            if not _equal(_frozen(vars(other)), frozen):
                return f"a setting of {type(other).__name__}"
        for own, size, label in self.classes:
            if len(own) != size:
                return f"the attributes of {label}"
        for entries, name, value, label in self.code.values():
            if entries.get(name) is not value:
                return f"{name} of {label}"
        for function, code, defaults in self.bodies:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return f"the code of {function.__qualname__}"
        return None


def _bodies(uses: dict[Any, Use]) -> Iterator[tuple[FunctionType, Any, Any]]:
    """The functions, and those that they wrap: IPython's autoreload gives them new code."""
    functions = (each for _, _, value, _ in uses.values() for each in wrapped_by(value))
    for function in functions:
        if isinstance(function, FunctionType):
            yield function, function.__code__, function.__defaults__


class _Module:
    """The state of one module.  It keeps neither the module nor its tensors alive.

    The fast paths are for speed: thousands of modules are compared before each generation.
    """

    __slots__ = (
        "containers", "get", "ids", "kind", "module", "names", "size", "tensors", "values", "weak",
    )  # fmt: skip

    def __init__(self, module: Any) -> None:
        own = dict(vars(module))  # another thread may change them
        self.module, self.kind = weakref.ref(module), type(module)
        self.names = _names(own)
        values = [own[name] for name in self.names]
        #: all values, first those that are compared; raises if an attribute is gone
        self.get = itemgetter(*self.names, *(own.keys() - {*self.names}))
        self.size = len(own)
        self.values = [_frozen(value) for value in values]
        self.ids = [*map(id, values)]
        self.weak = [value for value in self.values if isinstance(value, weakref.ref)]
        self.containers = [n for n, value in enumerate(self.values) if isinstance(value, tuple)]
        self.tensors = [*map(_place, _tensors(module))]

    def change(self) -> str | None:
        module = self.module()
        if module is None:
            return "the set of modules"
        if type(module) is not self.kind:
            return f"the class of a {self.kind.__name__}"
        what = self._changed_setting(vars(module)) or self._changed_tensor(_tensors(module))
        return None if what is None else f"{what} of a {type(module).__name__}"

    def _changed_setting(self, own: Any) -> str | None:
        try:
            values = self.get(own)[: len(self.names)]
            is_known = len(own) == self.size
        except KeyError:
            is_known = False
        if not is_known:
            if _names(own) != self.names:
                return "attributes"
            values = tuple(own[name] for name in self.names)
        # An id is that of the same object as long as the object is alive.
        same = [*map(id, values)] == self.ids and not any(ref() is None for ref in self.weak)
        for number in self.containers if same else range(len(values)):
            new, old = values[number], self.values[number]
            is_empty = same and len(old) == 1 and not new  # as most are
            if not is_empty and not _equal(_frozen(new), old):
                return str(self.names[number])
        return None

    def _changed_tensor(self, tensors: list[Any]) -> str | None:
        if len(tensors) != len(self.tensors):
            return "tensors"
        for tensor, place in zip(tensors, self.tensors, strict=True):
            new = _place(tensor)
            if new != place:
                is_state = new[:-1] == place[:-1]
                return "the statistics of a quantized weight" if is_state else "a tensor"
        return None


def _place(tensor: Any) -> tuple[Any, ...]:
    """What a graph needs to know of a tensor.  A weak reference would stop ``swap_tensors``."""
    pointer = address(tensor)
    where = id(tensor) if pointer is None else (pointer, tensor.stride())
    # A kernel gets a number that is on the CPU by its value; it may come from a short vector.
    is_number = tensor.device.type == "cpu" and tensor.numel() <= NUMBERS
    values = str(tensor.tolist()) if is_number else None
    state = tuple(_state_addresses(tensor)) if vars(tensor) else ()
    return type(tensor), where, tensor.shape, tensor.dtype, values, state


def _names(own: Any) -> tuple[str, ...]:
    return tuple(name for name in own if name not in LEFT_OUT)


def _tensors(module: Any) -> list[Any]:
    """The tensors of a module, and the host tensors that are copied for its forward."""
    own = vars(module)
    hook = offload_hook(module) if "_hf_hook" in own else None
    if hook is None:
        state = own.get("state")
        if state is None:
            return own_tensors(module)
        return own_tensors(module) + present({n: getattr(state, n, None) for n in ("CB", "SCB")})
    streamed = streamed_tensors(hook)
    # An offloaded embedding has other parameters during each lookup.
    return own_tensors(module) + streamed if streamed else present(own["_buffers"])


def _state_addresses(tensor: Any) -> Iterator[int | None]:
    """The addresses of the statistics of a quantized tensor."""
    for name in ("quant_state", "CB", "SCB"):
        state = vars(tensor).get(name)
        if state is not None:
            yield from _addresses_in(state)


def _addresses_in(state: Any) -> Iterator[int | None]:
    if hasattr(state, "data_ptr"):
        yield address(state)
        return
    for name, value in vars(state).items():
        if hasattr(value, "data_ptr"):
            yield address(value)
        elif name == "state2" and value is not None:  # the statistics are quantized too
            yield from _addresses_in(value)


def _frozen(value: Any) -> Any:
    """What ``_equal`` compares a value by; keeps neither a module nor a tensor alive."""
    if isinstance(value, CONTAINERS):
        entries: Iterable[Any] = value
        if isinstance(value, dict):
            items = [*value.items()]  # another thread may add its hook
            entries = (entry for item in items if type(item[0]) is not OwnHook for entry in item)
        return (type(value), *map(_frozen, entries))
    if isinstance(value, _PLAIN):
        return value
    if hasattr(type(value), "data_ptr"):  # which is quicker to see than in a module
        on_cpu = value.device.type == "cpu" and not value.is_inference()
        return (*_place(value), value._version if on_cpu else None)
    if isinstance(value, partial):
        return _frozen((value.func, value.args, value.keywords))
    if type(value).__name__ == "MatmulLtState":  # of bitsandbytes' 8-bit layers
        return value.threshold, value.has_fp16_weights
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _equal(new: Any, old: Any) -> bool:
    """Whether two frozen values are the same; there is one weak reference to each object."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if isinstance(new, tuple):
        return len(new) == len(old) and all(map(_equal, new, old))
    return isinstance(new, _PLAIN) and bool(new == old)
