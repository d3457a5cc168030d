"""Adds what a LoRA adapter computes from a few rows of inputs, in one or two kernels.

PEFT needs about eight kernels for it.  The kernels of ``one_row_lora.cu`` compute in float32 and
round once, to the dtype of the result.  PEFT also rounds the update before it adds it, so these
kernels are more exact.

If the matrix A is small, each block of one kernel multiplies the inputs with all of it.  Otherwise
a first kernel does this.  The order of the additions depends on the shapes only: the outputs of an
eager and of a captured step are equal bit for bit, and those of a row with and without other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from . import compiler
from .launch import Launcher
from .one_row_4bit import in_few_tokens
from .replacing import ALIGNMENT, FEW_TOKENS, current_device, dtypes, plain, raw_stream, runs_only
from .trials import pattern, require_near

LAUNCHER = Launcher("one_row_lora", "PEFT adds the updates of LoRA adapters")

_FILE = Path(__file__).with_suffix(".cu")
_RANKS = 256  # at most
_MOST = 1 << 31  # values
_SMALL = 160 << 10  # bytes of A, at most, for one kernel
_BLOCKS = 64  # of that kernel, at most
_THREADS = 1024, 512, 256  # of a block of that kernel, of the first and of the second of two


def in_kernels(original: Any, onloaded: Callable[..., Any]) -> Any:
    """A function that uses the kernels where it can, in our models' forwards with a few tokens.

    Args:
        original: ``forward`` of PEFT's ``Linear4bit`` for LoRA.
        onloaded: Makes a context in which some modules are onloaded.
    """
    import torch
    from peft.tuners.lora import bnb

    is_compiling, is_usual = torch.compiler.is_compiling, original.__globals__ is vars(bnb)

    @wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = None
        if (
            not (is_compiling() or args or kwargs)
            and in_few_tokens()
            and is_usual
            and type(self) is bnb.Linear4bit
        ):
            adapter = _without_errors(None, x, adapter_of, self, x)
        if adapter is None:
            return original(self, x, *args, **kwargs)
        hooked = any("_hf_hook" in vars(each) for each in adapter[:2])
        with onloaded(*adapter[:2]) if hooked else nullcontext():
            result = _result(self, x, *adapter)
        return original(self, x) if result is None else result

    return forward


def _result(layer: Any, x: Any, *adapter: Any) -> Any:
    """The result of the base layer and of the adapter; ``None`` if PEFT has to compute them."""
    update = _without_errors(None, x, update_of, layer, x, *adapter)
    if update is None:
        return None
    kind, added, by_peft = update
    result = layer.base_layer(x)
    out = _without_errors(kind, x, added, result)
    return by_peft(result) if out is None else out


def adapter_of(layer: Any, x: Any) -> Any:
    """A, B, the dropout and the scaling of the only active adapter; ``None`` if PEFT has to add it.

    The weights of A and B may be on meta.
    """
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if (
        not plain()(x)
        or len(names) != 1
        or names[0] in layer.lora_variant
        or layer.disable_adapters
        or layer.merged
        or not getattr(layer, "cast_input_dtype_enabled", True)
    ):
        return None
    (name,) = names
    first, second, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    scaling = layer.scaling[name]
    if (
        not (_is_plain_linear(first) and _is_plain_linear(second) and _passes(dropout))
        or type(scaling) not in (float, int)
        or x.shape[-1] != first.weight.shape[1]
        or not x.numel()
        or not x.is_contiguous()
    ):
        return None
    return first, second, dropout, scaling


def update_of(layer: Any, x: Any, first: Any, second: Any, dropout: Any, scaling: Any) -> Any:
    """A kind, and two functions that add an adapter's update to a result; ``None`` if PEFT has to.

    The first returns ``None`` if the kernels cannot add it.  The second computes as PEFT does.
    """
    import torch

    a, b, index, size = first.weight, second.weight, x.get_device(), x.shape[-1]
    (rank, _), (outputs, middle) = a.shape, b.shape
    pointers = x.data_ptr(), a.data_ptr(), b.data_ptr()
    if (
        not (a.get_device() == b.get_device() == index == current_device()())
        or not (a.is_contiguous() and b.is_contiguous() and a.dtype is b.dtype)
        or middle != rank
        or (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT
    ):
        return None
    tokens = x.numel() // size
    key = x.device, x.dtype, a.dtype, size, rank, outputs, scaling, tokens
    launch = LAUNCHER.kinds.get(key) or LAUNCHER.get(key, x.device, _launch, *key)
    if launch is None:
        return None

    def added(result: Any) -> Any:
        if (
            type(result) is not torch.Tensor
            or result.dtype is not x.dtype
            or result.get_device() != index
            or not result.shape[-1] == result.numel() // tokens == outputs
            or not result.is_contiguous()
            or result.is_neg()
        ):
            return None
        out = torch.empty_like(result)
        launch(x, out.data_ptr(), result.data_ptr(), *pointers)
        return out

    def by_peft(result: Any) -> Any:
        update = second(first(dropout(layer._cast_input_dtype(x, a.dtype)))) * scaling
        return result + update.to(result.dtype)

    return key, added, by_peft


def _without_errors(kind: Any, x: Any, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # PEFT computes it, or raises its own error
        return LAUNCHER.failed(kind, getattr(x, "device", None), error)


def _is_plain_linear(layer: Any) -> bool:
    from torch import nn

    parameters, forward = layer._parameters, nn.Linear.forward
    return (
        type(layer) is nn.Linear
        and getattr(forward, "__globals__", None) is vars(nn.modules.linear)
        and type(parameters["weight"]) is nn.Parameter
        and parameters["bias"] is None
        and runs_only(layer, forward)
    )


def _passes(dropout: Any) -> bool:
    """Whether a dropout returns its inputs."""
    from torch import nn

    kind = type(dropout)
    passes = kind is nn.Identity or (kind is nn.Dropout and not dropout.training)
    return passes and runs_only(dropout, kind.forward)


def _launch(
    device: Any, dtype: Any, adapter: Any, inputs: int, rank: int, outputs: int, scaling: float,
    tokens: int,
) -> Any:  # fmt: skip
    """A function that launches the kernels for these shapes; ``None`` if there are none."""
    import torch

    if (
        dtype not in dtypes()
        or dtype is torch.float32
        or adapter not in dtypes()
        or not 0 < rank <= _RANKS
        or not 0 < inputs * rank < _MOST
        or not 0 < outputs * rank < _MOST
        or tokens > FEW_TOKENS
        or inputs % 4
    ):
        return None
    kind = device, dtype, adapter, rank, inputs * rank * adapter.itemsize <= _SMALL
    LAUNCHER.checked(kind, device, _compare, *kind)
    return _launching(*kind, inputs, outputs, float(scaling), tokens)


def _launching(
    device: Any, dtype: Any, adapter: Any, rank: int, is_small: bool, inputs: int, outputs: int,
    scaling: float, tokens: int, most: int = _BLOCKS,
) -> Callable[..., None]:  # fmt: skip
    import torch

    stream_of, index = raw_stream(), device.index

    def part(number: int) -> tuple[Any, int]:
        """The launcher of a kernel, and the number of its blocks for all outputs."""
        threads, constants = _THREADS[number], {"INPUT": dtypes()[dtype], "RANK": rank}
        constants |= {"ADAPTER": dtypes()[adapter], "PART": number, "THREADS": threads}
        kernel = compiler.compiled(_FILE, "one_row_lora", device, **constants)
        numbers = inputs, outputs, scaling
        launch = compiler.launcher(kernel, 6, numbers, (threads, 1), rows=tokens, early=True)
        return launch, -(-outputs // (threads // _lanes(rank)))

    if is_small:
        both, blocks = part(0)
        return lambda x, *pointers: both(min(blocks, most), stream_of(index), *pointers, 0)
    (first, _), (second, blocks) = part(1), part(2)

    def in_two(x: Any, *pointers: int) -> None:
        middle, stream = x.new_empty(tokens * rank, dtype=torch.float32), stream_of(index)
        pointers += (middle.data_ptr(),)
        first(rank, stream, *pointers)
        second(blocks, stream, *pointers)

    return in_two


def _compare(device: Any, dtype: Any, adapter: Any, rank: int, is_small: bool) -> None:
    """Compare the kernels with PEFT's computation, for few inputs and outputs."""
    import torch
    from torch.nn.functional import linear

    # More rows of B than a block computes at once, and inputs that do not fill the warps.
    inputs, outputs, scaling, tokens = 1172, 2 * _THREADS[0] // _lanes(rank) + 1, 0.5, 2
    x, result = (pattern((tokens, n), dtype, device, n) for n in (inputs, outputs))
    a, b = (pattern(shape, adapter, device, 1) for shape in ((rank, inputs), (outputs, rank)))
    x, a = x + x.sign() / 2, a / inputs**0.5  # each input changes the result
    own = torch.full_like(result, float("nan"))
    launch = _launching(device, dtype, adapter, rank, is_small, inputs, outputs, scaling, tokens, 1)
    launch(x, *(each.data_ptr() for each in (own, result, x, a, b)))

    def by_peft(x: Any, a: Any, b: Any, result: Any) -> Any:
        return result + (linear(linear(x.to(a.dtype), a), b) * scaling).to(result.dtype)

    exact = by_peft(*(each.double() for each in (x, a, b, result)))
    require_near(own, by_peft(x, a, b, result), exact)


def _lanes(rank: int) -> int:
    """How many threads share a row of B."""
    loads = rank if rank % 4 else rank // 4
    return min(32, 1 << (loads - 1).bit_length())
