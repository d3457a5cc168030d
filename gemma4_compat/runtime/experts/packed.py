"""The experts of a layer as two ``Params4bit``.

The quant state of such a parameter has the shape of the whole fused tensor: experts x rows x
columns.  The blocks of an expert follow each other, so its packed bytes and the maxima of its
blocks are slices of the parameter's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from ...model.quant_state import tensors_of, with_tensors

#: The names of the fused parameters of a layer's experts.
FUSED = ("gate_up_proj", "down_proj")

#: On a parameter on a GPU whose memory is the host's.
IN_HOST_MEMORY = "_in_host_memory"


def has_fused_form(module: Any) -> bool:
    """Whether a module has all experts of a layer in two parameters, out x in, without biases."""
    shapes = []
    for name in FUSED:
        parameter = module._parameters.get(name)
        if parameter is None or parameter.dim() != 3 or not parameter.is_floating_point():
            return False
        shapes.append(parameter.shape)
    (experts, twice, hidden), (others, out, inner) = shapes
    if getattr(module, "is_transposed", False) or getattr(module, "has_bias", False):
        return False
    return (experts, twice, hidden) == (others, 2 * inner, out)


def fits_in_blocks(module: Any, blocksize: int) -> bool:
    """Whether no block of a quantized fused parameter contains values of two experts."""
    return all(module._parameters[name][0].numel() % blocksize == 0 for name in FUSED)


def is_packed(parameter: Any) -> bool:
    """Whether a parameter holds the experts of a layer in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return state is not None and len(state.shape or ()) == 3


def packed_parameters(module: Any) -> dict[str, Any]:
    """The parameters of a module that hold experts in 4 bits, by name."""
    own = module._parameters
    return {name: own[name] for name in FUSED if name in own and is_packed(own[name])}


def experts_in(model: Any) -> Iterator[tuple[str, Any]]:
    """The names and modules of a model's experts in 4 bits."""
    for name, module in model.named_modules():
        if packed_parameters(module):
            yield name, module


def quantized(value: Any, like: Any) -> Any:
    """A weight in 4 bits, on its device, with the options of another ``Params4bit``."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        value,
        requires_grad=False,
        blocksize=like.blocksize,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
        quant_storage=like.quant_storage,
    ).to(value.device)


def dequantize(module: Any, dtype: Any = None) -> None:
    """Replace the experts of a module by the numbers that they stand for."""
    import torch

    for name, parameter in packed_parameters(module).items():
        module._parameters[name] = torch.nn.Parameter(Packed(parameter, dtype).whole())
    vars(module).pop("compute_dtype", None)


class Packed:
    """The experts in one ``Params4bit``: whole, one, or several chosen by index on the device."""

    def __init__(self, parameter: Any, dtype: Any = None) -> None:
        self.state = parameter.quant_state
        self.dtype = dtype or self.state.dtype
        self.shape = tuple(self.state.shape)
        self.in_host_memory = getattr(parameter, IN_HOST_MEMORY, False)
        self._data = parameter.data

    def whole(self, number: int | None = None) -> Any:
        """All experts, or one of them, dequantized."""
        if number is None:
            return self._dequantized(slice(None), self.shape)
        return self._dequantized(slice(number, number + 1), self.shape[1:])

    def through(self, keep: Any, give: Any) -> Callable[[], Packed]:
        """A function that returns these experts, from tensors that passed through hooks."""
        tensors = tensors_of(self.state)
        kept = [keep(each) for each in (self._data, *tensors.values())]
        copied = copy.copy(self)
        copied.state, copied._data = with_tensors(self.state, dict.fromkeys(tensors)), None

        def given() -> Packed:
            again = copy.copy(copied)
            again._data, *values = map(give, kept)
            again.state = with_tensors(copied.state, dict(zip(tensors, values, strict=True)))
            return again

        return given

    def several(self, indices: Any) -> Any:
        """The experts of these indices, dequantized; nothing is read back from the device."""
        return self._dequantized(indices, (len(indices), *self.shape[1:]))

    def chosen(self, indices: Any, state: Any) -> Packed:
        """A copy of the experts of these indices, in 4 bits; ``state`` is their quant state."""
        copied = copy.copy(self)
        copied.shape, copied.in_host_memory = (len(indices), *self.shape[1:]), False
        copied.state, copied._data = state, _rows(self._bytes(), indices)
        return copied

    def chosen_state(self, indices: Any) -> Any:
        """The quant state of the experts of these indices, nested if that is possible."""
        state, experts = self.state, self.shape[0]
        maxima = state.absmax.view(experts, -1)
        if not state.nested or maxima.shape[1] % state.state2.blocksize:
            return self._state(self._maxima(indices), (len(indices), *self.shape[1:]))
        chosen, nested = copy.copy(state), copy.copy(state.state2)
        chosen.absmax = _rows(maxima, indices).view(-1)
        nested.absmax = _rows(nested.absmax.view(experts, -1), indices).view(-1)
        chosen.state2 = nested
        return chosen

    def tensors(self) -> tuple[Any, ...]:
        """The packed values and the tensors that their maxima are made of."""
        state = self.state
        if not state.nested:
            return self._data, state.absmax
        nested = state.state2
        return self._data, state.absmax, nested.code, nested.absmax, state.offset

    def stacked(self, indices: Any) -> tuple[Any, Any]:
        """The experts of these indices below each other, as one matrix in 4 bits."""
        _, rows, columns = self.shape
        packed = _rows(self._bytes(), indices).view(-1, 1)
        return packed, self._state(self._maxima(indices), (len(indices) * rows, columns))

    def stacked_inputs(self, indices: Any) -> tuple[Any, Any]:
        """The experts of these indices beside each other, as one matrix in 4 bits."""
        experts, rows, columns = self.shape
        chosen = len(indices)
        packed = self._bytes().view(experts, rows, -1)
        packed = _rows(packed.transpose(0, 1), indices, 1).view(-1, 1)
        maxima = self._maxima(indices).view(chosen, rows, -1).transpose(0, 1)
        return packed, self._state(maxima.reshape(-1), (rows, chosen * columns))

    def rows_are_blocks(self) -> bool:
        """Whether no block contains values of two rows."""
        return bool(self.shape[2] % self.state.blocksize == 0)

    def _bytes(self) -> Any:
        """The packed values, one row for each expert."""
        import torch

        return self._data.reshape(-1).view(torch.uint8).view(self.shape[0], -1)

    def _maxima(self, chosen: Any) -> Any:
        """The maxima of the blocks of these experts (indices or a slice), in float32."""
        from bitsandbytes.functional import dequantize_blockwise

        state, experts = self.state, self.shape[0]
        maxima = state.absmax.view(experts, -1)
        if not state.nested:
            return _chosen(maxima, chosen).reshape(-1)
        nested = state.state2
        if maxima.shape[1] % nested.blocksize == 0:
            maxima = dequantize_blockwise(
                _chosen(maxima, chosen).reshape(-1),
                absmax=_chosen(nested.absmax.view(experts, -1), chosen).reshape(-1),
                code=nested.code,
                blocksize=nested.blocksize,
            )
        else:  # a block of maxima contains those of two experts
            whole = dequantize_blockwise(state.absmax, nested).view(experts, -1)
            maxima = _chosen(whole, chosen).reshape(-1)
        return (maxima + state.offset).float()

    def _dequantized(self, chosen: Any, shape: Any) -> Any:
        """The values of these experts (indices or a slice).

        bitsandbytes' kernel for the CPU is wrong if the blocks do not begin with the rows.  Here
        each row is a block.
        """
        from bitsandbytes.functional import dequantize_4bit

        blocksize = self.state.blocksize
        state = self._state(self._maxima(chosen), (math.prod(shape) // blocksize, blocksize))
        packed = _chosen(self._bytes(), chosen).reshape(-1, 1)
        return dequantize_4bit(packed, state).view(shape).to(self.dtype)

    def _state(self, maxima: Any, shape: Any) -> Any:
        from bitsandbytes.functional import QuantState

        return QuantState(
            absmax=maxima,
            shape=shape,
            code=self.state.code,
            blocksize=self.state.blocksize,
            quant_type=self.state.quant_type,
            dtype=self.state.dtype,
        )


def _chosen(table: Any, chosen: Any) -> Any:
    return table[chosen] if isinstance(chosen, slice) else _rows(table, chosen)


def _rows(table: Any, indices: Any, dim: int = 0) -> Any:
    """``table.index_select(dim, indices)``, of eight bytes at a time if their number allows it."""
    import torch

    if table.dtype is torch.uint8 and table.shape[-1] % 8 == 0:
        wide = table.view(torch.int64)
        return wide.index_select(dim, indices).view(torch.uint8)
    return table.index_select(dim, indices)
