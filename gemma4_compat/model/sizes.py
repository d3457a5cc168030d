"""Computes the bytes of a model, tensor by tensor, without its weights.

The model is on the meta device (`meta.meta_model`).  The tensors are those of a loaded model:
parameters, buffers, and the statistics that bitsandbytes stores beside a quantized weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..files.checkpoint import Location, adapter_header
from .parts import decoder_layers, part_of, shared_layers

#: PyTorch's CUDA allocator rounds each allocation up to a multiple of this, in bytes
_CUDA_ROUNDING = 512
_NESTED_BLOCKSIZE = 256  # of bitsandbytes' double quantization


def on_cuda(nbytes: int) -> int:
    """The bytes that ``torch.cuda.memory_allocated`` counts for an allocation."""
    return -(-nbytes // _CUDA_ROUNDING) * _CUDA_ROUNDING


@dataclass(frozen=True)
class TensorSize:
    """A tensor of a loaded model.

    ``name`` is the name of the parameter or buffer.  The statistics of a quantized weight have its
    name with a suffix such as ``.absmax``.  ``buffer`` tells buffers from parameters, as accelerate
    leaves the buffers of an offloaded module on the execution device.
    """

    name: str
    bytes: int
    buffer: bool = False

    @property
    def on_cuda(self) -> int:
        """The bytes that ``torch.cuda.memory_allocated`` counts for it."""
        return on_cuda(self.bytes)

    @property
    def part(self) -> str:
        return part_of(self.name)


# -- the model's tensors ------------------------------------------------------------------------


def tensor_sizes(model: Any) -> tuple[TensorSize, ...]:
    """Every tensor of ``model`` after loading; tied ones once, by their first name.

    ``model`` is on meta, from `meta.meta_model`.  bitsandbytes' layers are not quantized yet, but
    get their size after quantization.
    """
    tensors: list[TensorSize] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) not in seen:
                tensors += _parameter(name, parameter, module)
        for name, buffer in module.named_buffers(path, recurse=False):
            if id(buffer) not in seen:
                tensors.append(TensorSize(name, buffer.nbytes, buffer=True))
        seen.update(map(id, (*module._parameters.values(), *module._buffers.values())))
    return tuple(tensors)


def _parameter(name: str, tensor: Any, module: Any) -> Iterator[TensorSize]:
    kind = type(tensor).__name__
    if kind == "Params4bit":
        linear = hasattr(module, "in_features")  # else all experts of a layer, on meta
        elements = module.in_features * module.out_features if linear else tensor.numel()
        blocks = -(-elements // tensor.blocksize)
        yield TensorSize(name, -(-elements // 2))
        yield TensorSize(f"{name}.quant_map", 4 * 16)
        if not tensor.compress_statistics:
            yield TensorSize(f"{name}.absmax", 4 * blocks)
            return
        yield TensorSize(f"{name}.absmax", blocks)
        yield TensorSize(f"{name}.nested_absmax", 4 * -(-blocks // _NESTED_BLOCKSIZE))
        yield TensorSize(f"{name}.nested_quant_map", 4 * 256)
        yield TensorSize(f"{name}.nested_offset", 4)
    elif kind == "Int8Params":
        yield TensorSize(name, module.in_features * module.out_features)
        yield TensorSize(f"{name}.SCB", 4 * module.out_features)
    else:
        # bfloat16, whatever the replaced layer has, but for the packed layers of a QAT checkpoint
        size = tensor.element_size() if hasattr(module, "num_bits") else 2
        yield TensorSize(name, tensor.numel() * size)


def adapter_sizes(adapter_dir: Location) -> tuple[TensorSize, ...]:
    """The tensors of an adapter as PEFT loads them: in float32, on the GPU.

    This reads only the header of ``adapter_model.safetensors``.

    Raises:
        InputError: there is no such file, or its header is damaged.
    """
    entries = adapter_header(adapter_dir).values()
    return tuple(TensorSize(entry.name, 4 * entry.numel) for entry in entries)


# -- the KV cache -------------------------------------------------------------------------------


def kv_shapes(model: Any) -> dict[int, tuple[int, int]]:
    """By layer index: the heads of a token's key (or value) and their size.

    Layers that use keys and values of earlier layers are left out.
    """
    shared = shared_layers(model.config)
    shapes = {}
    for index, name in decoder_layers(name for name, _ in model.named_modules()).items():
        attention = model.get_submodule(name).self_attn
        if index not in shared:
            width = attention.head_dim
            shapes[index] = (attention.k_proj.out_features // width, width)
    return shapes


def static_cache_bytes(model: Any, length: int) -> dict[int, int]:
    """By layer index: the bytes of transformers' own ``StaticCache`` for ``length`` tokens."""
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    cache, shapes = StaticCache(config=config, max_cache_len=length), kv_shapes(model)
    fill_cache(cache, shapes, 1)
    tensors = {index: (cache.layers[index].keys, cache.layers[index].values) for index in shapes}
    return {i: sum(each.untyped_storage().nbytes() for each in two) for i, two in tensors.items()}


def fill_cache(cache: Any, shapes: Mapping[int, tuple[int, int]], tokens: int) -> None:
    """Update a cache with meta tensors of so many tokens."""
    import torch

    for index, (heads, width) in shapes.items():
        key = torch.empty((1, heads, tokens, width), dtype=torch.bfloat16, device="meta")
        cache.update(key, torch.empty_like(key), index)
