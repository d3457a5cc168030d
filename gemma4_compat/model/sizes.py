"""Computes the bytes of a model, tensor by tensor, without its weights.

The model is on the meta device (`meta.meta_model`).  The tensors are those of a loaded model:
parameters, buffers, and the statistics that bitsandbytes stores beside a quantised weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .files import Location, adapter_header
from .parts import LAYERS, is_under, part_of, shared_layers

#: PyTorch's CUDA allocator rounds each allocation up to a multiple of this, in bytes
_CUDA_ROUNDING = 512
_NESTED_BLOCKSIZE = 256  # of bitsandbytes' double quantisation


def on_cuda(nbytes: int) -> int:
    """The bytes that ``torch.cuda.memory_allocated`` counts for an allocation."""
    return -(-nbytes // _CUDA_ROUNDING) * _CUDA_ROUNDING


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
        return on_cuda(self.bytes)

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


def kv_shapes(model: Any) -> dict[int, tuple[int, int]]:
    """By layer index: the heads of a token's key (or value) and their size.

    Layers that use keys and values of earlier layers are left out.
    """
    shared = shared_layers(model.config)
    shapes = {}
    for name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.self_attn$", name)
        if layer is None or part_of(name) != LAYERS:
            continue
        if int(layer[1]) not in shared:
            shapes[int(layer[1])] = (module.k_proj.out_features // module.head_dim, module.head_dim)
    return shapes


def kv_cache_bytes(model: Any, steps: Iterable[int]) -> dict[int, int]:
    """By layer index: the bytes of transformers' own ``DynamicCache`` after these steps.

    ``steps`` holds the number of tokens of each forward.  Storages are counted, not views: after a
    long prompt in one step, the keys and values of a sliding layer are views of the whole prompt's,
    which stay in memory until the next step.  The dtype has two bytes.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = _cached_kinds(model)
    for tokens in steps:
        for (_, heads, width), (index, *_) in kinds.items():
            cache.update(*_keys_and_values(heads, tokens, width), index)
    return _by_layer(cache, kinds)


def static_cache_bytes(model: Any, length: int) -> dict[int, int]:
    """By layer index: the bytes of transformers' own ``StaticCache`` for ``length`` tokens."""
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=length)
    kinds = _cached_kinds(model)
    for (_, heads, width), (index, *_) in kinds.items():
        cache.layers[index].lazy_initialization(*_keys_and_values(heads, 1, width))
    return _by_layer(cache, kinds)


def _cached_kinds(model: Any) -> dict[tuple[str, int, int], list[int]]:
    """The layers that cache their own keys and values, by type of attention, heads and width."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    kinds: dict[tuple[str, int, int], list[int]] = {}
    for index, (heads, width) in kv_shapes(model).items():
        kinds.setdefault((types[index] if types else "", heads, width), []).append(index)
    return kinds


def _keys_and_values(heads: int, tokens: int, width: int) -> Any:
    import torch

    return torch.empty((2, 1, heads, tokens, width), dtype=torch.bfloat16, device="meta")


def _by_layer(cache: Any, kinds: Mapping[Any, list[int]]) -> dict[int, int]:
    """The bytes of each layer's keys and values; only the first layer of each kind has some."""
    sizes = {}
    for indices in kinds.values():
        layer = cache.layers[indices[0]]
        storages = [tensor.untyped_storage() for tensor in (layer.keys, layer.values)]
        once = {storage._cdata: storage.nbytes() for storage in storages}
        sizes.update(dict.fromkeys(indices, sum(once.values())))
    return sizes
