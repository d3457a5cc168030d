"""Copies the offloaded modules of a layer to their execution device in one block, ahead of time.

A ``Dispatch`` holds the layers that one dispatch of a model offloads.  An ``OffloadedLayer`` is one
of them, and a ``Part`` one module of the layer.  A ``Layout`` is the block of host memory with the
tensors of the layer, a ``Piece`` one of these, and a ``Copy`` the block on the device.  Experts in
4 bits are a layer of their own, ``Experts``, whose block the GPU reads in place.

This is one file because a dispatch, its layers and their copies change each other under one lock.

A ``KeyboardInterrupt`` may come at any line, and an allocation may fail.  So what a line makes is
assigned when it is complete, and each function may run again after it was interrupted.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

from ...model.hooks import host_tensors, offload_hooks
from ...model.parts import layer_of
from ...objects import NotCopied, View
from ..experts.packed import packed_parameters
from ..kernels.streams import is_capturing
from ..memory import is_short_of_memory
from .forward_lock import lock_of
from .hooked import AfterForward, Way
from .page_locked import on_gpu, page_lock, page_locked_memory
from .parts import ITSELF, Content, Part, Piece

logger = logging.getLogger(__name__)

#: Device types that can copy from page-locked memory while the CPU does other work.
STREAMED_TO = ("cuda",)

#: How many layers are copied ahead while one computes.
_AHEAD = 2

#: After the device had no memory for a layer that is copied ahead, so many run without.
_ALONE = 500

#: Alignment of the tensors in a block, in bytes; the same as that of PyTorch's allocator.
_ALIGNMENT = 512

_PART = "_streamed_part"  # attribute of a hook
#: Keys of the large tensors of experts in 4 bits.  The others stay on the GPU.
_READ_IN_PLACE = (ITSELF, "absmax")


class Blocks(Way):
    """Layers are copied in blocks; see the patch ``offload_streaming``."""

    def dispatched(self, root: Any) -> None:
        super().dispatched(root)
        parts = [part for part in map(part_of, offload_hooks(root.modules())) if part is not None]
        found = weakref.WeakSet(part.layer.dispatch for part in parts)
        if found:
            AfterForward(partial(_clear, found)).attach(root)

    def add(self, hook: Any, module: Any) -> None:
        """Register a module if its tensors are in host memory."""
        import torch

        if isinstance(module, torch.nn.Embedding):  # a forward needs only some of its rows
            return
        tensors = host_tensors(hook.weights_map) if hasattr(hook.weights_map, "dataset") else None
        if not hook.place_submodules and tensors is not None:
            dispatch = dispatches.get(id(tensors))
            if dispatch is None:
                dispatch = dispatches[id(tensors)] = Dispatch(tensors)
            dispatch.add(hook, module)

    def at_work(self, hooks: list[Any]) -> str | None:
        parts = [part for part in map(part_of, hooks) if part is not None]
        count = len({part.layer for part in parts if part.layer.device.type in STREAMED_TO})
        return f"copies {count} offloaded layers in blocks, ahead of time" if count else None

    def pre_forward(self, original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        part = part_of(hook)
        if part is None or not part.place(hook, module):
            return original(hook, module, *args, **kwargs)
        hook.tied_pointers_to_remove = set()
        return original(View(hook, offload=False), module, *args, **kwargs)

    def post_forward(self, original: Any, hook: Any, module: Any, output: Any) -> Any:
        part = part_of(hook)
        if part is None:
            return original(hook, module, output)
        if not part.put_back(module):
            output = original(hook, module, output)
            part.return_to(module)
            return output
        return original(View(hook, offload=False), module, output)


def _clear(found: Iterable[Dispatch], root: Any) -> None:
    """Release what a forward of this thread, or an error in an earlier one, left on the device."""
    for dispatch in list(found):
        if dispatch.thread == threading.get_ident():
            # An error comes from a capture that failed; ``in_capture`` clears it.
            with suppress(RuntimeError), lock_of(root, turn=0):
                dispatch.clear()


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
    if part.layer.layout is None:
        return None if part.collected(device) is not None else "accelerate copies its weights"
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


def streamed_layers(modules: Iterable[Any]) -> list[OffloadedLayer]:
    """The layers of these modules that are copied in blocks; empty before the first forward."""
    parts = map(part_of, offload_hooks(modules))
    layers = (part.layer for part in parts if part is not None and part.layer.host is not None)
    return list(dict.fromkeys(layers))


def first_layers(modules: Iterable[Any]) -> list[OffloadedLayer]:
    """The first streamed layer of each dispatch in these modules."""
    copied = [layer for layer in streamed_layers(modules) if not isinstance(layer, Experts)]
    return list({layer.dispatch: layer for layer in reversed(copied)}.values())


@contextmanager
def in_capture(first: list[OffloadedLayer]) -> Iterator[Callable[[], None]]:
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
            layer.dispatch.clear()


class Dispatch(NotCopied):
    """The layers that one dispatch of a model offloads."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors  # the offloaded tensors, by name
        self.layers: dict[str, OffloadedLayer] = {}
        self.current: OffloadedLayer | None = None
        self.sent: list[OffloadedLayer] = []  # their copies to the device have started
        self.thread: int | None = None  # which started them
        self.alone = 0  # so many of the next layers are copied without others ahead

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
            self.layers[layer] = OffloadedLayer(self, stack)
            if before is not None and before.stack == stack:
                before.following = self.layers[layer]
        part = Part(self.layers[layer], hook, module)
        self.layers[layer].parts.append(part)
        setattr(hook, _PART, part)

    def enter(self, layer: OffloadedLayer) -> None:
        """Copy a layer and the next ones to the device; release all others.

        With gradients enabled, nothing is copied ahead, because checkpointing runs the layers in
        reverse order.
        """
        import torch

        if self.thread != threading.get_ident():  # it may use another stream
            self.clear()
        if layer is self.current and layer.is_sent():
            return
        self.alone = max(self.alone - 1, 0)
        alone = torch.is_grad_enabled() or self.alone > 0
        self.send([layer] if alone else layer.with_following(), layer)
        self.current = layer

    def send(self, wanted: list[OffloadedLayer], current: OffloadedLayer | None = None) -> None:
        """Start the copies of these layers; release all others.

        The current stream waits for the copy of the ``current`` layer.
        """
        for layer in self.sent:
            if layer not in wanted:
                layer.release()
        self.sent, self.thread = wanted, threading.get_ident()
        for layer in wanted:
            try:
                layer.send()
            except Exception as error:
                alone = layer is current or is_capturing(layer.device)
                if alone or not is_short_of_memory(error):
                    raise
                self.alone = _ALONE
                return
            if layer is current:
                layer.wait()

    def leave(self, layer: OffloadedLayer) -> None:
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


#: ``id`` of a dict of tensors -> its ``Dispatch``, which keeps the dict alive.
dispatches: weakref.WeakValueDictionary[int, Dispatch] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Layout:
    """The block of host memory with the tensors of a layer.

    Without a block, and for parts that it does not have, accelerate copies the modules.
    """

    contents: dict[Part, Content] = field(default_factory=dict)
    host: Any = None  # uint8
    page_locked: bool = False

    def views(self, block: Any) -> dict[Any, Any]:
        """The block, here or on the device, as a tensor of each dtype in it."""
        dtypes = {piece.host.dtype for content in self.contents.values() for piece in content}
        return {dtype: block.view(dtype) for dtype in dtypes}


@dataclass(eq=False)
class Copy:
    """The block of a layer on the device."""

    block: Any
    owner: Any = None  # the stream on which the block was allocated
    captured: bool = False  # only recorded in a graph
    event: Any = None  # the end of the copy, until a stream waits for it
    views: dict[Any, Any] = field(default_factory=dict)  # empty until the copy has started


class OffloadedLayer(NotCopied):
    """The offloaded tensors of one layer, as one block of memory."""

    in_place = False  # the GPU reads the block of host memory

    def __init__(self, dispatch: Dispatch, stack: str) -> None:
        self.dispatch, self.stack = dispatch, stack
        self.following: OffloadedLayer | None = None
        self.parts: list[Part] = []
        self.layout: Layout | None = None  # before the first forward
        self.copy: Copy | None = None
        self.pending: set[Part] = set()  # parts whose forward has not run since the last copy
        self.refused: Part | None = None  # it found no room; its next forward tries again

    @property
    def device(self) -> Any:
        import torch

        return torch.device(self.parts[0].hook.execution_device)

    @property
    def host(self) -> Any:
        """The block of host memory; ``None`` before the first forward, and if there is none."""
        return None if self.layout is None else self.layout.host

    @property
    def page_locked(self) -> bool:
        return self.layout is not None and self.layout.page_locked

    @property
    def on_device(self) -> dict[Any, Any]:
        """The block on the device, as a tensor of each dtype; empty if it is not there."""
        return {} if self.copy is None else self.copy.views

    def lay_out(self) -> Layout:
        """Choose the modules to copy in the block and move their tensors, before the first forward.

        If this is not possible, accelerate copies the modules.
        """
        if self.layout is None:
            self.layout = self.new_layout()
        return self.layout

    def new_layout(self) -> Layout:
        import torch

        if self.device.type not in STREAMED_TO:
            return Layout()
        found = {part: part.collected(self.device) for part in self.parts}
        contents = {part: content for part, content in found.items() if content is not None}
        pieces = [piece for content in contents.values() for piece in content]
        four_bit = any(content.states for content in contents.values())
        if not pieces:
            return Layout()
        sizes = [-(-piece.host.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces]
        host, page_locked = self.allocate(sum(sizes))
        if not page_locked and torch.cuda.is_available():
            _warn_pageable()
            if not four_bit:
                return Layout()
        layout = Layout(contents, host, page_locked)
        block = layout.views(host)
        for piece, start in zip(pieces, accumulate(sizes, initial=0), strict=False):
            piece.start = start
            piece.host = piece.view_in(block).copy_(piece.host)
        # The block then is the only copy in host memory.  The values of the tensors stay.
        for part, content in contents.items():
            part.host_tensors.update(part.stored(content))
        return layout

    def allocate(self, size: int) -> tuple[Any, bool]:
        """Host memory for the block, and whether it is page-locked."""
        import torch

        host = torch.empty(size, dtype=torch.uint8)
        return host, page_lock(host, self.device if self.device.type == "cuda" else None)

    def with_following(self) -> list[OffloadedLayer]:
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

    def is_sent(self) -> bool:
        """Whether a copy to the device has started; one in a capture is none outside it."""
        copy = self.copy
        if copy is None or not copy.views:
            return False
        return copy.captured == is_capturing(self.device)

    def send(self) -> None:
        """Start to copy the block to the device, unless a copy has already started."""
        import torch

        layout = self.lay_out()
        if layout.host is None or self.is_sent():
            return
        self.release()
        captured = is_capturing(self.device)
        # A block that was copied ahead in inference mode may be used by a forward with gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            block = torch.empty_like(layout.host, device=self.device)
            self.pending = set(layout.contents)
            if self.device.type == "cuda":
                # A capture has its own stream, because another thread may copy at the same time.
                copying = _copying_stream(self.device, captured)
                # Kernels of the current stream may still use the memory that the block reuses.
                owner = torch.cuda.current_stream(self.device)
                copying.wait_stream(owner)
                # The block lives until the copy has ended, also if an interrupt comes meanwhile.
                self.copy = Copy(block, owner, captured)
                with torch.cuda.stream(copying):
                    block.copy_(layout.host, non_blocking=True)
                    self.copy.event = copying.record_event()
            else:
                self.copy = Copy(block, None, captured)
                block.copy_(layout.host)
            self.copy.views = layout.views(block)

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        import torch

        copy = self.copy
        if copy is None or copy.event is None:
            return
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copy.event)
        if computing != copy.owner:
            copy.block.record_stream(computing)
        copy.event = None

    def release(self) -> None:
        """Free the block's memory on the device; a recorded graph may still hold it."""
        import torch

        copy = self.copy
        if copy is None:
            return
        if copy.captured == is_capturing(self.device):
            self.wait()
            if not copy.views and copy.owner is not None:  # the start of the copy was interrupted
                copying = _copying_stream(self.device, copy.captured)
                torch.cuda.current_stream(self.device).wait_stream(copying)
        self.copy = None

    def has_run(self, part: Part) -> None:
        self.pending.discard(part)
        if not self.pending:
            self.dispatch.leave(self)


class Experts(OffloadedLayer):
    """The experts of a layer in 4 bits: a forward needs only those that its tokens are routed to.

    The GPU reads them in place.  If the block is not page-locked, it is copied for each forward.
    """

    def __init__(self, dispatch: Dispatch, stack: str) -> None:
        super().__init__(dispatch, stack)
        self.copies: dict[Piece, Any] = {}  # of small tensors, for which a read takes long
        self.read: dict[Any, Any] = {}  # the block for the GPU to read, as a tensor of each dtype

    @property
    def in_place(self) -> bool:  # type: ignore[override]
        return bool(self.read)

    @property
    def on_device(self) -> dict[Any, Any]:
        return self.read or super().on_device

    def allocate(self, size: int) -> tuple[Any, bool]:
        host = page_locked_memory(size, self.device) if self.device.type == "cuda" else None
        return super().allocate(size) if host is None else (host, True)

    def enter(self) -> None:
        self.send()
        self.wait()

    def send(self) -> None:
        layout = self.lay_out()
        if layout.page_locked and not self.read:
            block = on_gpu(layout.host, self.device)
            if block is not None:
                self.copies = self.small(layout)
                self.read = layout.views(block)
        if not self.read:
            super().send()

    def small(self, layout: Layout) -> dict[Piece, Any]:
        """The small tensors, on the device."""
        import torch

        pieces = [
            piece
            for content in layout.contents.values()
            for by_key in content.pieces.values()
            for key, piece in by_key.items()
            if key not in _READ_IN_PLACE
        ]
        with torch.inference_mode(mode=False), torch.no_grad():
            return {piece: piece.host.to(self.device, copy=True) for piece in pieces}

    def view(self, piece: Piece) -> Any:
        copied = self.copies.get(piece)
        return super().view(piece) if copied is None else copied

    def has_run(self, part: Part) -> None:
        self.release()


@cache
def _warn_pageable() -> None:
    logger.warning(
        "The host memory of some offloaded layers is not page-locked, because the system refused "
        "it or the limit is reached.  Their copies to the GPU are slower, and decode steps are not "
        "captured as CUDA graphs.  gemma4_compat.limit_page_locked(nbytes) sets the limit."
    )


@cache
def _copying_stream(device: Any, captured: bool) -> Any:
    import torch

    return torch.cuda.Stream(device)
