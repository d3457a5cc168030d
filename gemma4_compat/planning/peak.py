"""Measures the peak memory of activations on the meta device, without a GPU and without weights.

The model's own code runs on meta tensors, which have shapes but no data, while every tensor that
this creates is counted.  So the estimate follows the installed transformers and PEFT.  Two things
differ on a GPU, and are replaced by functions that allocate what the GPU's kernels allocate: the
attention kernel, and the layers of bitsandbytes.  This is one file because these functions and what
counts them share one mode of PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as assumptions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..model.caches import cache_name, with_all_layers
from ..model.meta import checkpointing
from ..model.parts import decoder_layers, shared_layers
from ..model.sizes import fill_cache, kv_shapes, on_cuda

#: the largest head size of FlashAttention
_FLASH_HEAD = 256
#: The memory-efficient kernel copies a mask whose last dimension is no multiple of this.
_MASK_ALIGNMENT = 16
#: PyTorch's allocator does not split a block if less than this would remain.  So a tensor that is
#: larger than this takes up to this number of bytes more.
_UNSPLIT = 2**20


class PeakMemory(TorchDispatchMode):  # type: ignore[misc]
    """A context that counts the memory of the tensors that are created in it on a model's device.

    ``live`` is the number of bytes of those that exist now.  ``peak`` is the highest value of
    ``allocated``, and ``largest`` the number of bytes of the largest tensor of the attention.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._device = tensors[0].device
        self._uncounted = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._counted: dict[int, int] = {}
        self._large = self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # Without data, questions such as "is no token masked?" are answered no.
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
                self._count(leaf.untyped_storage(), is_of_attention=leaf.ndim > 3)
        return result

    def _count(self, storage: Any, is_of_attention: bool) -> None:
        key = storage._cdata
        if key in self._counted or key in self._uncounted:
            return
        taken = on_cuda(storage.nbytes())
        self._counted[key] = taken
        self.live += taken
        self._large += taken > _UNSPLIT
        self.peak = max(self.peak, self.allocated)
        self.largest = max(self.largest, taken * is_of_attention)
        weakref.finalize(storage, self._drop, key).atexit = False

    @property
    def allocated(self) -> int:
        """The most bytes that the existing tensors take on a GPU."""
        return self.live + self._large * _UNSPLIT

    def _drop(self, key: int) -> None:
        taken = self._counted.pop(key)
        self.live -= taken
        self._large -= taken > _UNSPLIT


# -- the kernels of a GPU -------------------------------------------------------------------------


class _FusedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Allocates what the memory-efficient kernel allocates."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if output.dtype != torch.float32:
            torch.empty_like(output, dtype=torch.float32)  # the kernel adds up in float32
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Replaces ``scaled_dot_product_attention`` where a GPU uses a fused kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._nn.scaled_dot_product_attention:  # also within a user's function
            query, key, value = args[:3]
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            grouped = kwargs.get("enable_gqa", False) and query.shape[1] != key.shape[1]
            # The memory-efficient kernel takes no grouped queries, and FlashAttention no mask.
            if not grouped or (mask is None and query.shape[-1] <= _FLASH_HEAD):
                return _FusedAttention.apply(query, key, value, _bias(mask, query.dtype))
        return func(*args, **kwargs)


def _attention(fused: bool) -> Any:
    return _Attention() if fused else sdpa_kernel(SDPBackend.MATH)


def _bias(mask: Any, dtype: torch.dtype) -> Any:
    """The mask as the kernel takes it: of the queries' dtype, and aligned."""
    if mask is None:
        return None
    bias = mask.to(dtype)
    padding = -mask.shape[-1] % _MASK_ALIGNMENT
    return nn.functional.pad(bias, (0, padding)) if padding else bias


class _Linear4bit(torch.autograd.Function):  # type: ignore[misc]
    """Dequantizes the whole weight for a forward and for a backward, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, input: Any, shape: tuple[int, int]) -> Any:
        ctx.shape = shape
        return nn.functional.linear(input, input.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.matmul(grads[0], grads[0].new_empty(ctx.shape)), None


class _Linear8bit(_Linear4bit):
    """Quantizes the input but for outliers, and multiplies into int32, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, input: Any, shape: tuple[int, int]) -> Any:
        ctx.shape = shape
        quantized = torch.empty_like(input, dtype=torch.int8)
        half = torch.empty_like(input, dtype=torch.float16)
        magnitudes = torch.empty_like(half)
        outliers = torch.empty_like(half, dtype=torch.bool)
        del half, magnitudes, outliers
        output = (*input.shape[:-1], shape[0])
        products = input.new_empty(output, dtype=torch.int32)
        half = input.new_empty(output, dtype=torch.float16)
        result = input.new_empty(output)
        del quantized, products, half
        return result


_KERNELS = {"Linear4bit": _Linear4bit, "Linear8bitLt": _Linear8bit}


def _use_kernels(model: nn.Module) -> None:
    """Give the layers of bitsandbytes, and experts in 4 bits, a forward that works on meta."""
    wrappers: dict[nn.Module, list[Any]] = {}
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":  # of PEFT: a wrapper for each parameter
            vars(module)["forward"] = module.base_layer
            if module.num_experts > 1:
                wrappers.setdefault(module.get_base_layer(), []).append(module)
    for module in model.modules():
        kernel = _KERNELS.get(type(module).__name__)
        packed = [p for p in module._parameters.values() if type(p).__name__ == "Params4bit"]
        # PEFT's layers around them have the same names.
        if kernel is not None and type(module).__module__.startswith("bitsandbytes"):
            shape = (module.out_features, module.in_features)
            dtype = getattr(module, "compute_dtype", None)
            vars(module)["forward"] = partial(_linear, kernel, shape, dtype)
        elif (packed and not isinstance(module, nn.Linear)) or module in wrappers:
            vars(module)["forward"] = partial(_experts, module, packed, wrappers.get(module, ()))


def _linear(kernel: Any, shape: tuple[int, int], dtype: Any, input: Any) -> Any:
    if input.numel() == shape[1] and not input.requires_grad and kernel is _Linear4bit:
        return input.new_empty((*input.shape[:-1], shape[0]))  # the GEMV kernel
    return kernel.apply(input if dtype is None else input.to(dtype), shape).to(input.dtype)


def _experts(
    module: Any,
    packed: list[Any],
    adapted: Sequence[Any],
    states: Any,
    indices: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's own forward, and what it takes to dequantize its experts.

    Few tokens dequantize their own experts.  More tokens dequantize all of one parameter at a time,
    and again for a backward.  LoRA needs the gradient of the sum of a weight and its update.
    Autograd keeps the sums, too, if the experts are not in 4 bits, or with PEFT < 0.21.
    """
    changed = [module._parameters[each.parameter_name] for each in adapted]
    shapes_of = [parameter.shape for parameter in packed or changed]
    experts = shapes_of[0][0]
    trains = torch.is_grad_enabled() and states.requires_grad
    few = 2 * indices.numel() <= experts and not trains
    count = indices.numel() if few else experts
    dtype = getattr(module, "compute_dtype", None)
    largest = max(shapes_of, key=lambda shape: shape.numel())
    factors = packed and all(hasattr(each, "get_delta_factors") for each in adapted)
    sums = [] if factors else [parameter.shape for parameter in changed]
    dequantized = [(count, *shape[1:]) for shape in (shapes_of if few else [largest])]
    held = _allocated(states, dequantized * bool(packed) + sums, dtype)
    result = type(module).forward(module, states, indices, *args, **kwargs)
    del held
    if result.requires_grad:
        shapes = [largest] * (bool(packed) + bool(adapted)) + sums
        result.register_hook(lambda grad: _allocated(grad, shapes, dtype) and None)
    return result


def _allocated(like: Any, shapes: Sequence[Any], dtype: Any) -> list[Any]:
    return [like.new_empty(shape, dtype=dtype) for shape in shapes]


# -- the layers -----------------------------------------------------------------------------------


class _Skipped(nn.Module):  # type: ignore[misc]
    """In place of a decoder layer that takes the same memory as another one."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


@contextmanager
def one_layer_of_each_kind(model: nn.Module) -> Iterator[dict[int, int]]:
    """A context in which only one decoder layer of each kind runs.

    Layers are of one kind if they have the same shapes and the same type of attention.  The last
    one of each kind runs; later layers use the keys and values of that one.  Yields the indices of
    these layers, with the number of layers of their kind.
    """
    stack = _decoder(model)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or [None] * len(stack)
    shared = shared_layers(config)
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(stack):
        shapes = tuple((name, *tensor.shape) for name, tensor in layer.named_parameters())
        kinds.setdefault((types[index], index in shared, shapes), []).append(index)
    kept = {indices[-1]: len(indices) for indices in kinds.values()}
    layers = dict(enumerate(stack))
    try:
        for index in layers.keys() - kept.keys():
            stack[index] = _Skipped()
        yield kept
    finally:
        for index, layer in layers.items():
            stack[index] = layer


def _decoder(model: nn.Module) -> Any:
    layers = decoder_layers(name for name, _ in model.named_modules())
    return model.get_submodule(layers[0].rpartition(".")[0])


# -- forward and backward -------------------------------------------------------------------------


def forward_peak(model: Any, tokens: int, past: int, *, fused: bool = True) -> tuple[int, int]:
    """The bytes of activations of a forward with ``tokens`` tokens after ``past`` cached ones.

    Returns the bytes of all of them at their peak, and the bytes of the attention's largest one.

    ``model`` is on meta, and stays unchanged, apart from the forwards of bitsandbytes' layers.  The
    cache is a static one, with room for one more token, and is not counted.  Only the last token
    gets logits.  Without ``fused``, PyTorch computes all scores of the attention: it has no other
    kernel for bfloat16 on a GPU that does not compute in it.
    """
    from transformers import StaticCache

    config = with_all_layers(model.config.get_text_config(decoder=True))
    cache, shapes = StaticCache(config=config, max_cache_len=past + tokens + 1), kv_shapes(model)
    with torch.no_grad(), _measuring(model, fused) as (memory, _):
        fill_cache(cache, shapes, past or 1)
        start = memory.peak = memory.allocated
        memory.largest = 0
        ids = torch.empty((1, tokens), dtype=torch.long, device="meta")
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_name(): cache})
    return memory.peak - start, memory.largest


def training_peak(model: Any, tokens: int, fused: bool = True) -> int:
    """The bytes of activations of a training step on one sequence, with labels for every token.

    ``model`` is on meta, and has an adapter.  Gradients of the adapter are not counted.  With
    gradient checkpointing, only the input of each decoder layer is kept for the backward.
    ``fused`` is that of `forward_peak`.
    """
    model.train()
    # A backward leaves the mode; a checkpoint must run the layer as it ran before.
    contexts = {"context_fn": lambda: (nullcontext(), _attention(fused))}
    getattr(model, checkpointing())({"use_reentrant": False, **contexts})
    model.enable_input_require_grads()  # else the first layer that runs keeps less than others
    ids = torch.empty((1, tokens), dtype=torch.long, device="meta")
    inputs = dict.fromkeys(("input_ids", "attention_mask", "labels", "mm_token_type_ids"), ids)
    kept: list[int] = []  # the input of a layer; a checkpoint runs the layer again in the backward
    with _measuring(model, fused) as (memory, kinds):
        hook = _decoder(model)[min(kinds)].register_forward_pre_hook(
            lambda _, inputs: kept.append(on_cuda(inputs[0].nbytes))
        )
        model(**inputs, use_cache=False).loss.backward()
    hook.remove()
    for parameter in model.parameters():
        parameter.grad = None
    return memory.peak + (sum(kinds.values()) - len(kinds)) * kept[0]


@contextmanager
def _measuring(model: Any, fused: bool = True) -> Iterator[tuple[PeakMemory, dict[int, int]]]:
    """A context that counts the memory of forwards, with one decoder layer of each kind."""
    _use_kernels(model)
    memory = PeakMemory(model)
    every_element = assumptions.patch(meta_nonzero_assume_all_nonzero=True)
    with one_layer_of_each_kind(model) as kinds, every_element, _attention(fused), memory:
        yield memory, kinds
