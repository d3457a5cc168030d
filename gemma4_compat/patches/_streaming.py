"""Copies the offloaded modules of a layer to their execution device in one block, ahead of time.

A ``Dispatch`` holds the layers that one dispatch of a model offloads.  A ``Layer`` holds the block
of host memory with its tensors, a ``Part`` one module of the layer, and a ``Piece`` one tensor.
Experts in 4 bits are a layer of their own, ``Experts``, whose block the GPU reads in place.
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
from ..model.parts import MODELS, layer_of
from ._int8_state import empty
from ._not_copied import NotCopied
from ._packed_experts import IN_HOST_MEMORY, packed_parameters
from ._page_locked import on_gpu, page_lock, page_locked_memory
from ._side_stream import is_capturing

logger = logging.getLogger(__name__)

#: Device types that can copy from page-locked memory while the CPU does other work.
STREAMED_TO = ("cuda",)

#: How many layers are copied ahead while one computes.
_AHEAD = 2

#: Alignment of the tensors in a block, in bytes; the same as that of PyTorch's allocator.
_ALIGNMENT = 512

_PART = "_streamed_part"  # attribute of a hook
_ITSELF = ""  # key of the parameter's own tensor, beside those of its quant state
_SCALES = "SCB"  # key of the row scales of an 8-bit weight
#: Keys of the large tensors of experts in 4 bits.  The others stay on the GPU.
_READ_IN_PLACE = (_ITSELF, "absmax")


def add(hook: Any, module: Any) -> None:
    """Register a module that a hook offloads, if its tensors are in host memory."""
    import torch

    if isinstance(module, torch.nn.Embedding):  # a forward needs only some of its rows
        return
    tensors = host_tensors(hook.weights_map) if hasattr(hook.weights_map, "dataset") else None
    if hook.offload and not hook.place_submodules and tensors is not None:
        dispatch = dispatches.get(id(tensors))
        if dispatch is None:
            dispatch = dispatches[id(tensors)] = Dispatch(tensors)
        dispatch.add(hook, module)


def part_of(hook: Any) -> Part | None:
    """The ``Part`` of a hook; ``None`` if the hook's module is not copied with its layer."""
    part: Part | None = vars(hook).get(_PART) if hook.offload else None
    return part


def why_not_streamed(hook: Any, module: Any) -> str | None:
    """Why the copies of an offloaded module's weights need the CPU; ``None`` if they do not.

    Before the first forward, the answer is a forecast.
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
    """The tensors in host memory that are copied for the forward of a hook's module."""
    part = part_of(hook)
    if part is None:
        return []
    tensors = (part.host_tensors.get(part.prefix + name) for name in part.pieces)
    return [tensor for tensor in tensors if tensor is not None]


def streamed_layers(modules: Iterable[Any]) -> list[Layer]:
    """The layers of these modules that are copied in blocks; empty before the first forward."""
    parts = map(part_of, offload_hooks(modules))
    layers = (part.layer for part in parts if part is not None and part.layer.host is not None)
    return list(dict.fromkeys(layers))


def first_layers(modules: Iterable[Any]) -> list[Layer]:
    """The first streamed layer of each dispatch in these modules."""
    first: dict[Dispatch, Layer] = {}
    copied = (layer for layer in streamed_layers(modules) if not isinstance(layer, Experts))
    for layer in copied:
        first.setdefault(layer.dispatch, layer)
    return list(first.values())


@contextmanager
def captured(first: list[Layer]) -> Iterator[Callable[[], None]]:
    """A context in which to capture a CUDA graph; call the yielded function in the capture.

    The graph includes its own copies: no earlier copy is part of it, and no later forward waits
    for a copy that was only recorded.
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
    """The layers that one dispatch of a model offloads."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors  # the offloaded tensors, by name
        self.layers: dict[str, Layer] = {}
        self.current: Layer | None = None
        self.sent: list[Layer] = []  # layers whose copies to the device have started or ended
        self.ahead = True  # the device has memory for layers that are copied ahead

    def add(self, hook: Any, module: Any) -> None:
        """Register an offloaded module if it is in a layer, as ``layers.3.mlp`` is."""
        found = layer_of(hook.weights_map.prefix)
        if found is None:
            return
        stack, layer = found
        if packed_parameters(module):
            experts = Experts(self, stack)
            experts.parts = [Part(experts, hook, module)]
            setattr(hook, _PART, experts.parts[0])
            return
        if layer not in self.layers:
            before = next(reversed(self.layers.values()), None)
            self.layers[layer] = Layer(self, stack)
            if before is not None and before.stack == stack:
                before.following = self.layers[layer]
        part = Part(self.layers[layer], hook, module)
        self.layers[layer].parts.append(part)
        setattr(hook, _PART, part)

    def enter(self, layer: Layer) -> None:
        """Copy a layer and the next ones to the device; release all others.

        With gradients enabled, nothing is copied ahead, because checkpointing runs the layers in
        reverse order.
        """
        import torch

        if layer is self.current:
            return
        self.current = layer
        alone = torch.is_grad_enabled() or not self.ahead
        self.send([layer] if alone else layer.with_following())

    def send(self, wanted: list[Layer]) -> None:
        """Start the copies of these layers; release all others."""
        import torch

        for layer in self.sent:
            if layer not in wanted:
                layer.release()
        self.sent = wanted
        for layer in wanted:
            try:
                layer.send()
            except torch.cuda.OutOfMemoryError:
                if layer is self.current or is_capturing(layer.device):
                    raise
                self.ahead = False
                return
            if layer is self.current:
                layer.wait()

    def leave(self, layer: Layer) -> None:
        """Release a layer after the forwards of all its modules."""
        layer.release()
        self.sent = [other for other in self.sent if other is not layer]
        if layer is self.current:
            self.current = None

    def clear(self) -> None:
        """Release all layers."""
        for layer in self.sent:
            layer.release()
        self.sent, self.current = [], None

    def forget(self) -> None:
        """Release all layers after a capture, which recorded copies but did not run them."""
        for layer in self.sent:
            layer.copied = None
        self.clear()


#: ``id`` of a dict of tensors -> its ``Dispatch``, which keeps the dict alive.
dispatches: weakref.WeakValueDictionary[int, Dispatch] = weakref.WeakValueDictionary()


class Layer(NotCopied):
    """The offloaded tensors of one layer, as one block of memory."""

    def __init__(self, dispatch: Dispatch, stack: str) -> None:
        self.dispatch, self.stack = dispatch, stack
        self.following: Layer | None = None
        self.parts: list[Part] = []
        self.laid_out = False
        self.host: Any = None  # uint8, page-locked
        self.page_locked = False
        self.in_place = False  # the GPU reads the block of host memory
        self.device: Any = None
        self.dtypes: set[Any] = set()
        self.on_device: dict[Any, Any] = {}  # dtype -> view of the block on the device
        self.copied: Any = None  # the event at the end of a copy, until a stream waits for it
        self.owner: Any = None  # the stream on which the block's device memory was allocated
        self.pending: set[Part] = set()  # parts whose forward has not run since the last copy

    def lay_out(self) -> None:
        """Choose the modules to copy in the block and move their tensors, before the first forward.

        If this is not possible, or for unquantised and 8-bit layers of models outside ``MODELS``,
        accelerate copies the modules: three such blocks may need more GPU memory than single
        tensors.
        """
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
        host = self.allocate(size, device)
        if not self.page_locked and torch.cuda.is_available():
            _warn_pageable()
            if not four_bit:
                self.drop()
                return
        self.device, self.host = device, host
        self.dtypes = {piece.host.dtype for piece in pieces}
        for part in self.parts:
            part.move_to(self.views(self.host))

    def allocate(self, size: int, device: Any) -> Any:
        """Host memory for the block, page-locked if possible."""
        import torch

        host = torch.empty(size, dtype=torch.uint8)
        self.page_locked = page_lock(host, device if device.type == "cuda" else None)
        return host

    def is_known(self) -> bool:
        """Whether this is a layer of one of ``MODELS``."""
        return any(type(part.module).__module__.startswith(MODELS) for part in self.parts)

    def drop(self) -> None:
        """Let accelerate copy the modules of this layer."""
        for part in self.parts:
            part.pieces = {}

    def with_following(self) -> list[Layer]:
        """This layer, and the layers to copy ahead while it computes."""
        layers = [self]
        while len(layers) <= _AHEAD and layers[-1].following is not None:
            layers.append(layers[-1].following)
        return layers

    def enter(self) -> None:
        """Have the block on the device, for the forward of one of the layer's modules."""
        self.dispatch.enter(self)

    def view(self, piece: Piece) -> Any:
        """A tensor of the block, on the device."""
        return piece.view_in(self.on_device)

    def views(self, block: Any) -> dict[Any, Any]:
        return {dtype: block.view(dtype) for dtype in self.dtypes}

    def send(self) -> None:
        """Start to copy the block to the device, unless a copy has already started."""
        import torch

        if not self.laid_out:
            self.lay_out()
        if self.on_device or self.host is None:
            return
        # A block that was copied ahead in inference mode may be used by a forward with gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            block = _empty_like(self.host, self.device)
            if self.device.type == "cuda":
                # A capture has its own stream, because another thread may copy at the same time.
                copying = _copying_stream(self.device, is_capturing(self.device))
                # Kernels of the current stream may still use the memory that the block reuses.
                self.owner = torch.cuda.current_stream(self.device)
                copying.wait_stream(self.owner)
                with torch.cuda.stream(copying):
                    block.copy_(self.host, non_blocking=True)
                    self.copied = copying.record_event()
            else:
                block.copy_(self.host)
            self.on_device = self.views(block)
        self.pending = {part for part in self.parts if part.pieces}

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
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
        """Free the block's memory on the device; a recorded graph may still hold it."""
        self.wait()
        self.on_device = {}

    def has_run(self, part: Part) -> None:
        self.pending.discard(part)
        if not self.pending:
            self.dispatch.leave(self)


class Experts(Layer):
    """The experts of a layer in 4 bits: a forward needs only those that its tokens are routed to.

    The GPU reads them in place.  If the block is not page-locked, it is copied for each forward.
    """

    def __init__(self, dispatch: Dispatch, stack: str) -> None:
        super().__init__(dispatch, stack)
        self.copies: dict[Piece, Any] = {}  # of small tensors, for which a read takes long

    def allocate(self, size: int, device: Any) -> Any:
        host = page_locked_memory(size, device) if device.type == "cuda" else None
        if host is None:
            return super().allocate(size, device)
        self.page_locked = True
        return host

    def enter(self) -> None:
        self.send()
        self.wait()

    def send(self) -> None:
        if not self.laid_out:
            self.lay_out()
        if self.page_locked and not self.in_place:
            block = on_gpu(self.host, self.device)
            if block is not None:
                self.on_device, self.in_place = self.views(block), True
                self.copies = self.small()
        if not self.in_place:
            super().send()

    def small(self) -> dict[Piece, Any]:
        """The small tensors, on the device."""
        import torch

        pieces = [
            piece
            for part in self.parts
            for by_key in part.pieces.values()
            for key, piece in by_key.items()
            if key not in _READ_IN_PLACE
        ]
        with torch.inference_mode(mode=False), torch.no_grad():
            return {piece: piece.host.to(self.device, copy=True) for piece in pieces}

    def view(self, piece: Piece) -> Any:
        copied = self.copies.get(piece)
        return super().view(piece) if copied is None else copied

    def release(self) -> None:
        if not self.in_place:
            super().release()

    def has_run(self, part: Part) -> None:
        self.release()


@dataclass(eq=False)
class Piece:
    """One tensor of a block."""

    host: Any
    start: int = 0  # bytes

    def view_in(self, block: dict[Any, Any]) -> Any:
        offset = self.start // self.host.element_size()
        return block[self.host.dtype].as_strided(self.host.shape, self.host.stride(), offset)


class Part(NotCopied):
    """One offloaded module of a layer."""

    def __init__(self, layer: Layer, hook: Any, module: Any) -> None:
        self.layer, self.hook, self.module = layer, hook, module
        self.weights_map, self.prefix = hook.weights_map, hook.weights_map.prefix
        self.host_tensors = layer.dispatch.tensors
        #: Parameter name -> pieces: "" is the parameter, "absmax" etc. belong to its quant state.
        self.pieces: dict[str, dict[str, Piece]] = {}
        self.meta: dict[str, Any] = {}  # the parameters on meta
        self.states: dict[str, Any] = {}  # the quant states of 4-bit parameters
        self.placed: dict[str, Any] = {}  # the parameters on the device, during a forward

    def collect(self, device: Any) -> list[Piece]:
        """The module's tensors; empty if this part cannot be copied in a block."""
        import torch

        hook, own = self.hook, self.module._parameters
        if hook.offload_buffers or hook.tied_params_names:
            return []
        if torch.device(hook.execution_device) != device:
            return []
        self.meta = {name: own[name] for name in own if own[name] is not None}
        pieces = {}
        for name, parameter in self.meta.items():
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
            pieces[name] = {key: Piece(tensor) for key, tensor in tensors.items()}
        self.pieces = pieces
        return [piece for by_key in pieces.values() for piece in by_key.values()]

    def move_to(self, block: dict[Any, Any]) -> None:
        """Move the tensors into the block, which then is the only copy in host memory."""
        for name, pieces in self.pieces.items():
            for piece in pieces.values():
                piece.host = piece.view_in(block).copy_(piece.host)
            self.host_tensors[self.prefix + name] = pieces[_ITSELF].host
            if _SCALES in pieces:
                self.host_tensors[self.prefix + _SCALES] = pieces[_SCALES].host

    def place(self, hook: Any, module: Any) -> bool:
        """Give the module its parameters on the device; ``False`` if accelerate must do that."""
        import torch

        if not self.layer.laid_out:
            self.layer.lay_out()
        self.put_back(module)  # if an earlier forward raised
        if not self.pieces or not self.is_unchanged(hook, module):
            return False
        try:
            self.layer.enter()
        except torch.cuda.OutOfMemoryError:  # single tensors may still fit
            self.layer.dispatch.clear()
            self.layer.drop()
            return False
        for name, pieces in self.pieces.items():
            tensors = {key: self.layer.view(piece) for key, piece in pieces.items()}
            placed = _like(self.meta[name], tensors.pop(_ITSELF))
            if self.layer.in_place:
                setattr(placed, IN_HOST_MEMORY, True)
            self.placed[name] = placed
            if _SCALES in tensors:
                placed.CB, placed.SCB = placed.data, tensors[_SCALES]
            elif tensors:
                placed.quant_state = _state_with(self.states[name], tensors)
        module._parameters.update(self.placed)
        return True

    def is_unchanged(self, hook: Any, module: Any) -> bool:
        """Whether the hook, its weights and the module's parameters are still the same objects."""
        own = module._parameters
        return (
            hook is self.hook
            and hook.weights_map is self.weights_map
            and all(own.get(name) is parameter for name, parameter in self.meta.items())
            and all(self.meta[n].quant_state is state for n, state in self.states.items())
            and all(
                self.meta[name].dtype == pieces[_ITSELF].host.dtype
                and self.host_tensors.get(self.prefix + name) is pieces[_ITSELF].host
                for name, pieces in self.pieces.items()
            )
        )

    def put_back(self, module: Any) -> bool:
        """Give the module its meta parameters back, unless other code replaced them meanwhile."""
        placed, self.placed = self.placed, {}
        if not placed:
            return False
        self.layer.has_run(self)
        if any(_SCALES in pieces for pieces in self.pieces.values()):
            empty(module)
        if any(module._parameters.get(name) is not parameter for name, parameter in placed.items()):
            return False
        module._parameters.update(self.meta)
        return True


def _tensors(quant_state: Any) -> dict[str, Any]:
    """The tensors of a quant state, by name."""
    tensors = {"absmax": quant_state.absmax, "code": quant_state.code}
    if quant_state.nested:
        tensors["offset"] = quant_state.offset
        tensors["state2.absmax"] = quant_state.state2.absmax
        tensors["state2.code"] = quant_state.state2.code
    return tensors


def _state_with(quant_state: Any, tensors: dict[str, Any]) -> Any:
    """A copy of a quant state, with these tensors instead."""
    state = copy.copy(quant_state)
    if state.nested:
        state.state2 = copy.copy(state.state2)
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        setattr(state.state2 if path else state, attribute, tensor)
    return state


def _like(parameter: Any, data: Any) -> Any:
    """A parameter with this data, and the class and attributes of ``parameter``."""
    import torch

    new = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    vars(new).update(vars(parameter))
    return new


@cache
def _warn_pageable() -> None:
    logger.warning(
        "The host memory of some offloaded layers is not page-locked, because the system refused "
        "it or the limit is reached.  Their copies to the GPU are slower, and decode steps are not "
        "captured as CUDA graphs.  gemma4_compat.limit_page_locked(nbytes) sets the limit."
    )


def _empty_like(host: Any, device: Any) -> Any:
    import torch

    return torch.empty_like(host, device=device)


@cache
def _copying_stream(device: Any, captured: bool) -> Any:
    import torch

    return torch.cuda.Stream(device)
