"""The offloaded modules of a layer, and their tensors in the layer's block of host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...errors import reason
from ...model.quant_state import tensors_of, with_tensors
from ...objects import NotCopied
from ..experts.packed import IN_HOST_MEMORY
from ..kernels.streams import is_capturing
from ..memory import is_short_of_memory
from .int8_state import clear_state

_say = cache(logging.getLogger(__name__).info)

#: Keys of the tensors of a parameter: its own, and those of its quant state.
ITSELF = ""
SCALES = "SCB"  # the row scales of an 8-bit weight


@dataclass(eq=False)
class Piece:
    """One tensor of a block."""

    host: Any
    start: int = 0  # bytes

    def view_in(self, block: dict[Any, Any]) -> Any:
        offset = self.start // self.host.element_size()
        return block[self.host.dtype].as_strided(self.host.shape, self.host.stride(), offset)


@dataclass(frozen=True, eq=False)
class Content:
    """The tensors of one module."""

    #: Parameter name -> pieces: "" is the parameter, "absmax" etc. belong to its quant state.
    pieces: dict[str, dict[str, Piece]]
    meta: dict[str, Any]  # the parameters on meta
    states: dict[str, Any]  # the quant states of 4-bit parameters

    def __iter__(self) -> Iterator[Piece]:
        return (piece for by_key in self.pieces.values() for piece in by_key.values())


class Part(NotCopied):
    """One offloaded module of a layer."""

    def __init__(self, layer: Any, hook: Any, module: Any) -> None:
        self.layer, self.hook, self.module = layer, hook, module
        self.weights_map, self.prefix = hook.weights_map, hook.weights_map.prefix
        self.host_tensors = layer.dispatch.tensors
        self.placed: dict[str, Any] = {}  # the parameters on the device, during a forward
        self.left_out = False  # accelerate copies them in this forward, because there was no room

    @property
    def content(self) -> Content | None:
        """What the layer's block has of this module; ``None`` if accelerate copies it."""
        return None if self.layer.layout is None else self.layer.layout.contents.get(self)

    @property
    def pieces(self) -> dict[str, dict[str, Piece]]:
        return {} if self.content is None else self.content.pieces

    def collected(self, device: Any) -> Content | None:
        """The module's tensors; ``None`` if this part cannot be copied in a block."""
        import torch

        hook, own = self.hook, self.module._parameters
        if hook.offload_buffers or hook.tied_params_names:
            return None
        if torch.device(hook.execution_device) != device:
            return None
        meta = {name: own[name] for name in own if own[name] is not None}
        pieces, states = {}, {}
        for name, parameter in meta.items():
            host: Any = self.host_tensors.get(self.prefix + name)
            tensors = {ITSELF: host}
            if type(parameter).__name__ == "Params4bit" and parameter.quant_state is not None:
                states[name] = parameter.quant_state
                tensors.update(tensors_of(parameter.quant_state))
            elif type(parameter).__name__ == "Int8Params" and hasattr(self.module, "state"):
                tensors[SCALES] = self.host_tensors.get(self.prefix + SCALES)
            elif type(parameter) is not torch.nn.Parameter:
                return None
            if not all(t is not None and t.is_cpu and t.is_contiguous() for t in tensors.values()):
                return None
            if not parameter.is_meta or host.dtype != parameter.dtype:
                return None
            pieces[name] = {key: Piece(tensor) for key, tensor in tensors.items()}
        return Content(pieces, meta, states) if pieces else None

    def stored(self, content: Content) -> dict[str, Any]:
        """The pieces that accelerate loads, by name."""
        tensors = {}
        for name, pieces in content.pieces.items():
            tensors[self.prefix + name] = pieces[ITSELF].host
            if SCALES in pieces:
                tensors[self.prefix + SCALES] = pieces[SCALES].host
        return tensors

    def place(self, hook: Any, module: Any) -> bool:
        """Give the module its parameters on the device; ``False`` if accelerate must do that."""
        self.put_back(module)  # if an earlier forward raised
        if self.layer.refused is self:
            self.layer.refused = None
        try:
            if self.layer.refused is None:
                self.layer.lay_out()
            content = self.content
            if content is None or not self.is_unchanged(hook, module):
                return False
            self.left_out = self.layer.refused is not None
            if self.left_out:
                return False
            self.layer.enter()
        except Exception as error:  # single tensors may still fit
            if is_capturing(self.layer.device):  # accelerate's copies cannot be captured
                raise
            if not is_short_of_memory(error):
                if " error: " in str(error):  # of CUDA or HIP; any earlier kernel may cause it
                    raise
                _say("copying a layer in a block raised %s; accelerate copies it", reason(error))
            self.layer.refused = self
            self.left_out = self.content is not None
            self.layer.dispatch.clear()
            return False
        placed = {}
        for name, pieces in content.pieces.items():
            tensors = {key: self.layer.view(piece) for key, piece in pieces.items()}
            placed[name] = parameter = _like(content.meta[name], tensors.pop(ITSELF))
            if self.layer.in_place:
                setattr(parameter, IN_HOST_MEMORY, True)
            if SCALES in tensors:
                parameter.CB, parameter.SCB = parameter.data, tensors[SCALES]
            elif tensors:
                parameter.quant_state = with_tensors(content.states[name], tensors)
        self.placed = placed
        module._parameters.update(placed)
        return True

    def is_unchanged(self, hook: Any, module: Any) -> bool:
        """Whether the hook, its weights and the module's parameters are still the same objects."""
        own, content = module._parameters, self.content
        return (
            content is not None
            and hook is self.hook
            and hook.weights_map is self.weights_map
            and all(own.get(name) is parameter for name, parameter in content.meta.items())
            and all(content.meta[n].quant_state is state for n, state in content.states.items())
            and all(
                content.meta[name].dtype == pieces[ITSELF].host.dtype
                and self.host_tensors.get(self.prefix + name) is pieces[ITSELF].host
                for name, pieces in content.pieces.items()
            )
        )

    def put_back(self, module: Any) -> bool:
        """Give the module its meta parameters back, unless other code replaced them meanwhile."""
        own, content = module._parameters, self.content
        if not self.placed or content is None:
            return False
        self.layer.has_run(self)
        if any(SCALES in pieces for pieces in content.pieces.values()):
            clear_state(module)
        unchanged = all(own.get(name) is parameter for name, parameter in self.placed.items())
        if unchanged:
            own.update(content.meta)
        self.placed = {}
        return unchanged

    def return_to(self, module: Any) -> None:
        """After a forward without room, give the module its meta parameters back."""
        own, content = module._parameters, self.content
        if self.left_out and content is not None:
            pairs = [(own.get(name), meta) for name, meta in content.meta.items()]
            if all(
                new is not None and new.is_meta and new.dtype == old.dtype for new, old in pairs
            ):
                own.update(content.meta)
            self.left_out = False


def _like(parameter: Any, data: Any) -> Any:
    """A parameter with this data, and the class and attributes of ``parameter``."""
    import torch

    new = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    vars(new).update(vars(parameter))
    return new
