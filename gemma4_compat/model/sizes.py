"""Computes the bytes of a model, tensor by tensor, without its weights.

The model is on the meta device (`meta.meta_model`).  The tensors are those of a loaded model:
parameters, buffers, and the statistics that bitsandbytes stores beside a quantised weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .files import Location, adapter_header
from .parts import LAYERS, is_under, part_of, shared_layers

#: PyTorch's CUDA allocator rounds each allocation up to a multiple of this, in bytes
_CUDA_ROUNDING = 512
_NESTED_BLOCKSIZE = 256  # of bitsandbytes' double quantisation


@dataclass(frozen=True)
class TensorSize:
    """A tensor of a loaded model.

    ``name`` is the name of the parameter or buffer.  The statistics of a quantised weight have its
    name with a suffix such as ``.absmax``.  ``buffer`` tells buffers from parameters, as accelerate
    leaves the buffers of an offloaded module on the execution device.
    """

    name: str
    bytes: int
    buffer: bool = False

    @property
    def on_cuda(self) -> int:
        """The bytes that ``torch.cuda.memory_allocated`` counts for it."""
        return -(-self.bytes // _CUDA_ROUNDING) * _CUDA_ROUNDING

    @property
    def part(self) -> str:
        return part_of(self.name)


def bytes_under(sizes: Iterable[TensorSize], module: str, *, on_cuda: bool = False) -> int:
    """The bytes of all tensors in a module; ``""`` is the whole model."""
    return sum(
        size.on_cuda if on_cuda else size.bytes
        for size in sizes
        if not module or is_under(size.name, [module])
    )


# -- the model's tensors ------------------------------------------------------------------------


def tensor_sizes(model: Any) -> tuple[TensorSize, ...]:
    """Every tensor of ``model`` after loading; tied ones once, by their first name.

    ``model`` is on meta, from `meta.meta_model`.  bitsandbytes' layers are not quantised yet, but
    get their size after quantisation.
    """
    tensors: list[TensorSize] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if kind is module._buffers:
                    size = tensor.numel() * tensor.element_size()
                    tensors.append(TensorSize(prefix + name, size, buffer=True))
                else:
                    tensors += _parameter(prefix + name, tensor, module)
    return tuple(tensors)


def _parameter(name: str, tensor: Any, module: Any) -> Iterator[TensorSize]:
    kind = type(tensor).__name__
    if kind == "Params4bit":
        elements = module.in_features * module.out_features
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
        yield TensorSize(name, tensor.numel() * 2)  # bfloat16, whatever the replaced layer has


def adapter_sizes(adapter_dir: Location) -> tuple[TensorSize, ...]:
    """The tensors of an adapter as PEFT loads them: in float32, on the GPU.

    This reads only the header of ``adapter_model.safetensors``.

    Raises:
        InputError: there is no such file, or its header is damaged.
    """
    entries = adapter_header(adapter_dir).tensors.values()
    return tuple(TensorSize(entry.name, 4 * entry.numel) for entry in entries)


# -- the KV cache -------------------------------------------------------------------------------


def kv_widths(model: Any) -> dict[int, int]:
    """By layer index: the elements of a token's key (or value), if the layer caches its own."""
    shared = shared_layers(model.config)
    widths = {}
    for name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.self_attn$", name)
        if layer is None or part_of(name) != LAYERS:
            continue
        if int(layer[1]) not in shared:
            widths[int(layer[1])] = int(module.k_proj.out_features)
    return widths


def kv_cache_bytes(model: Any, steps: Iterable[int]) -> int:
    """The bytes of transformers' own ``DynamicCache`` after these steps, in bfloat16.

    ``steps`` holds the number of tokens of each forward.  Storages are counted, not views: after a
    long prompt in one step, the keys and values of a sliding layer are views of the whole prompt's,
    which stay in memory until the next step.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    widths = kv_widths(model)
    for tokens in steps:
        for index, width in widths.items():
            both = torch.empty((2, 1, 1, tokens, width), dtype=torch.bfloat16, device="meta")
            cache.update(*both, index)
    return _storage_bytes(cache)


def static_cache_bytes(model: Any, length: int) -> int:
    """The bytes of transformers' own ``StaticCache`` for ``length`` tokens, in bfloat16."""
    import torch
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=length)
    for index, width in kv_widths(model).items():
        both = torch.empty((2, 1, 1, 1, width), dtype=torch.bfloat16, device="meta")
        cache.layers[index].lazy_initialization(*both)
    return _storage_bytes(cache)


def _storage_bytes(cache: Any) -> int:
    storages = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
