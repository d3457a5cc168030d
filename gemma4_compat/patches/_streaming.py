"""Sending the offloaded modules of a layer to their device in one copy, ahead of time.

A ``Dispatch`` holds the layers that one dispatch of a model offloads, a ``Layer`` the block of host
memory with its tensors, a ``Part`` one module in it, a ``Piece`` one tensor.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..model.hooks import host_tensors, offload_hooks
from ._not_copied import NotCopied
from ._page_locked import page_lock

logger = logging.getLogger(__name__)

#: Kinds of devices that copy from page-locked memory by themselves.
STREAMED_TO = ("cuda",)

#: Unquantised and 8-bit layers are sent in blocks in these models only: three of them may need more
#: of the GPU than single tensors.
_MODELS = ("transformers.models.gemma3n", "transformers.models.gemma4")

#: How many layers are on their way while one computes.
_AHEAD = 2

#: Where the tensors of a block begin, in bytes: as PyTorch's allocator aligns them.
_ALIGNMENT = 512

_PART = "_streamed_part"  # a hook's attribute
_ITSELF = ""
_SCALES = "SCB"  # of an 8-bit weight


def add(hook: Any, module: Any) -> None:
    """Note a module that a hook offloads, if its tensors are in host memory."""
    import torch

    if isinstance(module, torch.nn.Embedding):  # only some rows of it are needed
        return
    tensors = host_tensors(hook.weights_map) if hasattr(hook.weights_map, "dataset") else None
    if hook.offload and not hook.place_submodules and tensors is not None:
        dispatch = dispatches.get(id(tensors))
        if dispatch is None:
            dispatch = dispatches[id(tensors)] = Dispatch(tensors)
        dispatch.add(hook, module)


def part_of(hook: Any) -> Part | None:
    """What a hook offloads, if it is sent with its layer."""
    part: Part | None = vars(hook).get(_PART) if hook.offload else None
    return part


def why_not_streamed(hook: Any, module: Any) -> str | None:
    """Why a GPU does not copy the weights of an offloaded module by itself; ``None`` if it does.

    Before the first forward it is what is to be expected.
    """
    import torch

    part = part_of(hook)
    device = torch.device(hook.execution_device)
    if part is None or device.type not in STREAMED_TO:
        return "accelerate copies its weights"
    if not part.layer.laid_out:
        expected = part.layer.is_known() and part.collect(device)
        return None if expected else "accelerate copies its weights"
    if not part.pieces or not part.is_unchanged(hook, module):
        return "accelerate copies its weights"
    return None if part.layer.page_locked else "its host memory is not page-locked"


def streamed_tensors(hook: Any) -> list[Any]:
    """The tensors in host memory that a hook's module is given copies of."""
    part = part_of(hook)
    if part is None:
        return []
    found = (part.host_tensors.get(part.prefix + name) for name in part.pieces)
    return [tensor for tensor in found if tensor is not None]


def streamed_layers(modules: Iterable[Any]) -> list[Layer]:
    """The layers of these modules that are sent in blocks: none before the first forward."""
    parts = map(part_of, offload_hooks(modules))
    layers = (part.layer for part in parts if part is not None and part.layer.host is not None)
    return list(dict.fromkeys(layers))


def first_layers(modules: Iterable[Any]) -> list[Layer]:
    """Of each dispatch the first of these layers."""
    found: dict[Dispatch, Layer] = {}
    for layer in streamed_layers(modules):
        found.setdefault(layer.dispatch, layer)
    return list(found.values())


@contextmanager
def captured(first: list[Layer]) -> Iterator[Callable[[], None]]:
    """A block that captures a CUDA graph, and calls the result when the capture has begun.

    The graph's copies are its own: none of before takes part, and none is to be waited for later.
    """

    def send_ahead() -> None:
        for layer in first:
            layer.dispatch.send(layer.with_following())

    for layer in first:
        layer.dispatch.clear()
    try:
        yield send_ahead
    finally:
        for layer in first:
            layer.dispatch.forget()


class Dispatch(NotCopied):
    """The layers of one dispatch."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors  # what is offloaded, by name
        self.layers: dict[str, Layer] = {}
        self.current: Layer | None = None
        self.sent: list[Layer] = []  # that are on their device, or on their way
        self.ahead = True  # there is room for layers that are sent ahead

    def add(self, hook: Any, module: Any) -> None:
        """Note an offloaded module, if it is in a layer: ``layers.3`` of ``layers.3.mlp.norm``."""
        names = hook.weights_map.prefix.rstrip(".").split(".")
        number = next((i for i, name in enumerate(names) if name.isdigit()), None)
        if number is None:
            return
        stack, layer = ".".join(names[:number]), ".".join(names[: number + 1])
        if layer not in self.layers:
            before = next(reversed(self.layers.values()), None)
            self.layers[layer] = Layer(self, stack)
            if before is not None and before.stack == stack:
                before.following = self.layers[layer]
        part = Part(self.layers[layer], hook, module)
        self.layers[layer].parts.append(part)
        setattr(hook, _PART, part)

    def enter(self, layer: Layer) -> None:
        """Have a layer on its device, and none but the next ones beside it.

        While a graph of gradients is recorded nothing is sent ahead: checkpointing runs layers
        backwards.
        """
        import torch

        if layer is self.current:
            return
        self.current = layer
        alone = torch.is_grad_enabled() or not self.ahead
        self.send([layer] if alone else layer.with_following())

    def send(self, wanted: list[Layer]) -> None:
        """Have these layers on their device or on their way, and no others."""
        import torch

        for layer in self.sent:
            if layer not in wanted:
                layer.release()
        self.sent = wanted
        for layer in wanted:
            try:
                layer.send()
            except torch.cuda.OutOfMemoryError:
                if layer is self.current or _is_capturing(layer.device):
                    raise
                self.ahead = False
                return
            if layer is self.current:
                layer.wait()

    def leave(self, layer: Layer) -> None:
        """All that is in the layer had its turn."""
        layer.release()
        self.sent = [each for each in self.sent if each is not layer]
        if layer is self.current:
            self.current = None

    def clear(self) -> None:
        """Have no layer on its device."""
        for layer in self.sent:
            layer.release()
        self.sent, self.current = [], None

    def forget(self) -> None:
        """The same after a capture: its copies are nothing to wait for."""
        for layer in self.sent:
            layer.copied = None
        self.clear()


#: By the identity of their dict of tensors, which they keep alive.
dispatches: weakref.WeakValueDictionary[int, Dispatch] = weakref.WeakValueDictionary()


class Layer(NotCopied):
    """What is offloaded of one layer, as one block of memory."""

    def __init__(self, dispatch: Dispatch, stack: str) -> None:
        self.dispatch, self.stack = dispatch, stack
        self.following: Layer | None = None
        self.parts: list[Part] = []
        self.laid_out = False
        self.host: Any = None  # uint8, page-locked
        self.page_locked = False
        self.device: Any = None
        self.dtypes: set[Any] = set()
        self.on_device: dict[Any, Any] = {}  # the block on the device, seen as each dtype
        self.copied: Any = None  # the event of a copy that nothing has waited for
        self.owner: Any = None  # the stream that the block's memory belongs to
        self.pending: set[Part] = set()  # had no turn since the block was sent

    def lay_out(self) -> None:
        """Once, before the first forward: choose the modules that take part, move their tensors."""
        import torch

        self.laid_out = True
        device = torch.device(self.parts[0].hook.execution_device)
        if device.type not in STREAMED_TO:
            return
        pieces = [piece for part in self.parts for piece in part.collect(device)]
        four_bit = any(part.states for part in self.parts if part.pieces)
        if not pieces or not (four_bit or self.is_known()):
            self.drop()
            return
        size = 0
        for piece in pieces:
            piece.start = size
            size += -(-piece.host.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8)
        self.page_locked = page_lock(host)
        if not self.page_locked and torch.cuda.is_available():
            _say_pageable()
            if not four_bit:
                self.drop()
                return
        self.device, self.host = device, host
        self.dtypes = {piece.host.dtype for piece in pieces}
        for part in self.parts:
            part.move_to(self.seen(self.host))

    def is_known(self) -> bool:
        """Whether it is a layer of one of ``_MODELS``."""
        return any(type(part.module).__module__.startswith(_MODELS) for part in self.parts)

    def drop(self) -> None:
        """Leave its modules to accelerate."""
        for part in self.parts:
            part.pieces = {}

    def with_following(self) -> list[Layer]:
        """This layer, and those that are sent ahead while it computes."""
        found = [self]
        while len(found) <= _AHEAD and found[-1].following is not None:
            found.append(found[-1].following)
        return found

    def seen(self, block: Any) -> dict[Any, Any]:
        return {dtype: block.view(dtype) for dtype in self.dtypes}

    def send(self) -> None:
        """Start copying the block, unless it is there or on its way."""
        import torch

        if not self.laid_out:
            self.lay_out()
        if self.on_device or self.host is None:
            return
        # Sent ahead in inference mode, it may still be needed by a forward that records a graph.
        with torch.inference_mode(mode=False), torch.no_grad():
            block = _empty_like(self.host, self.device)
            if self.device.type == "cuda":
                # Another thread may be copying while this one captures a CUDA graph.
                copying = _copying_stream(self.device, _is_capturing(self.device))
                # Until then this memory belongs to what was computed with it before.
                self.owner = torch.cuda.current_stream(self.device)
                copying.wait_stream(self.owner)
                with torch.cuda.stream(copying):
                    block.copy_(self.host, non_blocking=True)
                    self.copied = copying.record_event()
            else:
                block.copy_(self.host)
            self.on_device = self.seen(block)
        self.pending = {part for part in self.parts if part.pieces}

    def wait(self) -> None:
        """Have the stream that computes wait for the copy."""
        import torch

        if self.copied is None:
            return
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.copied)
        if computing != self.owner:
            for block in self.on_device.values():
                block.record_stream(computing)
        self.copied = None

    def release(self) -> None:
        """Give the block's memory back to the stream that computes; a graph may still hold it."""
        self.wait()
        self.on_device = {}

    def had_its_turn(self, part: Part) -> None:
        self.pending.discard(part)
        if not self.pending:
            self.dispatch.leave(self)


@dataclass(eq=False)
class Piece:
    """One tensor of a block."""

    host: Any
    start: int = 0  # bytes

    def seen_in(self, block: dict[Any, Any]) -> Any:
        offset = self.start // self.host.element_size()
        return block[self.host.dtype].as_strided(self.host.shape, self.host.stride(), offset)


class Part(NotCopied):
    """One offloaded module of a layer."""

    def __init__(self, layer: Layer, hook: Any, module: Any) -> None:
        self.layer, self.hook, self.module = layer, hook, module
        self.weights_map, self.prefix = hook.weights_map, hook.weights_map.prefix
        self.host_tensors = layer.dispatch.tensors
        #: By parameter, then "" for itself, "absmax", "state2.code"... for its quant state.
        self.pieces: dict[str, dict[str, Piece]] = {}
        self.resting: dict[str, Any] = {}  # the parameters on meta
        self.states: dict[str, Any] = {}  # the quant states of 4-bit ones
        self.placed: dict[str, Any] = {}  # what the module has in their place

    def collect(self, device: Any) -> list[Piece]:
        """The module's tensors; none where anything about them is out of the ordinary."""
        import torch

        hook, own = self.hook, self.module._parameters
        if hook.offload_buffers or hook.tied_params_names:
            return []
        if torch.device(hook.execution_device) != device:
            return []
        self.resting = {name: own[name] for name in own if own[name] is not None}
        pieces = {}
        for name, parameter in self.resting.items():
            host: Any = self.host_tensors.get(self.prefix + name)
            tensors = {_ITSELF: host}
            if type(parameter).__name__ == "Params4bit" and parameter.quant_state is not None:
                self.states[name] = parameter.quant_state
                tensors.update(_tensors(parameter.quant_state))
            elif type(parameter).__name__ == "Int8Params" and hasattr(self.module, "state"):
                tensors[_SCALES] = self.host_tensors.get(self.prefix + _SCALES)
            elif type(parameter) is not torch.nn.Parameter:
                return []
            if not all(t is not None and t.is_cpu and t.is_contiguous() for t in tensors.values()):
                return []
            if not parameter.is_meta or host.dtype != parameter.dtype:
                return []
            pieces[name] = {where: Piece(tensor) for where, tensor in tensors.items()}
        self.pieces = pieces
        return [piece for each in pieces.values() for piece in each.values()]

    def move_to(self, block: dict[Any, Any]) -> None:
        """What is in the block is from now on the host's only copy of the weights."""
        for name, pieces in self.pieces.items():
            for piece in pieces.values():
                piece.host = piece.seen_in(block).copy_(piece.host)
            self.host_tensors[self.prefix + name] = pieces[_ITSELF].host
            if _SCALES in pieces:
                self.host_tensors[self.prefix + _SCALES] = pieces[_SCALES].host

    def place(self, hook: Any, module: Any) -> bool:
        """Give the module its parameters on the device; ``False`` if that is not for us to do."""
        import torch

        if not self.layer.laid_out:
            self.layer.lay_out()
        self.put_back(module)  # after a forward that raised
        if not self.pieces or not self.is_unchanged(hook, module):
            return False
        try:
            self.layer.dispatch.enter(self.layer)
        except torch.cuda.OutOfMemoryError:  # there may be room for single tensors
            self.layer.dispatch.clear()
            self.layer.drop()
            return False
        for name, pieces in self.pieces.items():
            tensors = {
                where: piece.seen_in(self.layer.on_device) for where, piece in pieces.items()
            }
            placed = _like(self.resting[name], tensors.pop(_ITSELF))
            self.placed[name] = placed
            if _SCALES in tensors:
                placed.CB, placed.SCB = placed.data, tensors[_SCALES]
            elif tensors:
                placed.quant_state = _state_with(self.states[name], tensors)
        module._parameters.update(self.placed)
        return True

    def is_unchanged(self, hook: Any, module: Any) -> bool:
        own = module._parameters
        return (
            hook is self.hook
            and hook.weights_map is self.weights_map
            and all(own.get(name) is resting for name, resting in self.resting.items())
            and all(self.resting[n].quant_state is state for n, state in self.states.items())
            and all(
                self.resting[name].dtype == pieces[_ITSELF].host.dtype
                and self.host_tensors.get(self.prefix + name) is pieces[_ITSELF].host
                for name, pieces in self.pieces.items()
            )
        )

    def put_back(self, module: Any) -> bool:
        """Give the module its meta parameters, unless somebody gave it others meanwhile."""
        placed, self.placed = self.placed, {}
        if not placed:
            return False
        self.layer.had_its_turn(self)
        if any(_SCALES in pieces for pieces in self.pieces.values()):
            state = module.state  # which Linear8bitLt computes with
            state.CB = state.SCB = None
        if any(module._parameters.get(name) is not parameter for name, parameter in placed.items()):
            return False
        module._parameters.update(self.resting)
        return True


def _tensors(quant_state: Any) -> dict[str, Any]:
    """The tensors of a quant state."""
    found = {"absmax": quant_state.absmax, "code": quant_state.code}
    if quant_state.nested:
        found["offset"] = quant_state.offset
        found["state2.absmax"] = quant_state.state2.absmax
        found["state2.code"] = quant_state.state2.code
    return found


def _state_with(quant_state: Any, tensors: dict[str, Any]) -> Any:
    """A quant state of its own with other tensors."""
    state = copy.copy(quant_state)
    if state.nested:
        state.state2 = copy.copy(state.state2)
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        setattr(state.state2 if path else state, attribute, tensor)
    return state


def _like(parameter: Any, data: Any) -> Any:
    """A parameter of the same class and with the same attributes."""
    import torch

    new = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    vars(new).update(vars(parameter))
    return new


@cache
def _say_pageable() -> None:
    logger.warning(
        "The host memory of some offloaded layers is not page-locked, because the system refuses "
        "it or the limit is reached.  They come to the GPU more slowly, and decode steps are not "
        "captured as CUDA graphs.  gemma4_compat.limit_page_locked(nbytes) sets the limit."
    )


def _is_capturing(device: Any) -> bool:
    import torch

    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _empty_like(host: Any, device: Any) -> Any:
    import torch

    return torch.empty_like(host, device=device)


@cache
def _copying_stream(device: Any, captured: bool) -> Any:
    import torch

    return torch.cuda.Stream(device)
