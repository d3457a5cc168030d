"""How many bytes a model takes, part by part, from its ``config.json`` alone.

The model is built on the meta device, and transformers' own quantiser decides which layers are
quantised.  Counted is what a loaded model holds: parameters, buffers, and the statistics that
bitsandbytes keeps beside a quantised weight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .model.files import CONFIG, adapter_header, read_config

QUANTS = ("nf4", "int8", "bf16")
LAYERS, PLE, EMBEDDINGS, VISION, AUDIO, REST = (
    "decoder layers", "per-layer embeddings", "token embeddings", "vision", "audio", "the rest",
)  # fmt: skip
#: of PyTorch's CUDA allocator: what it gives out is a multiple of this
_CUDA_ROUNDING = 512
_NESTED_BLOCKSIZE = 256  # of bitsandbytes' double quantisation


@dataclass(frozen=True)
class TensorSize:
    """A tensor that a loaded model holds.

    ``name`` is that of the parameter or buffer, with what bitsandbytes keeps beside a weight as
    ``.absmax`` and the like after it.  ``buffer``: accelerate leaves those of an offloaded module
    on the device that computes.
    """

    name: str
    bytes: int
    buffer: bool = False

    @property
    def on_cuda(self) -> int:
        """Its bytes as ``torch.cuda.memory_allocated`` counts them."""
        return -(-self.bytes // _CUDA_ROUNDING) * _CUDA_ROUNDING

    @property
    def part(self) -> str:
        return part_of(self.name)


def part_of(name: str) -> str:
    """The part of the model that a module or tensor of this name belongs to."""
    path = name.split(".")
    if "embed_tokens_per_layer" in path:
        return PLE
    if any(step.startswith("vision") or step.endswith("_vision") for step in path):
        return VISION
    if any(step.startswith("audio") or step.endswith("_audio") for step in path):
        return AUDIO
    if "embed_tokens" in path or "lm_head" in path:
        return EMBEDDINGS
    return LAYERS if re.search(r"(^|\.)layers\.\d+(\.|$)", name) else REST


def is_under(name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of these modules, or inside of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def bytes_under(sizes: Iterable[TensorSize], module: str, *, on_cuda: bool = False) -> int:
    """The bytes of everything under a module's name; ``""`` is the whole model."""
    return sum(
        size.on_cuda if on_cuda else size.bytes
        for size in sizes
        if not module or is_under(size.name, [module])
    )


# -- the model ----------------------------------------------------------------------------------


def meta_model(
    model_dir: str | os.PathLike[str],
    quantization_config: Any = None,
    device_map: Mapping[str, Any] | None = None,
) -> Any:
    """The model of a folder's ``config.json`` on the meta device, in bfloat16; no weight is read.

    With a ``BitsAndBytesConfig`` its linear layers are replaced by those of bitsandbytes, but for
    those that transformers keeps: among others what ``device_map`` puts on "cpu" or "disk".

    Raises:
        InputError: no such folder, or its ``config.json`` does not describe a model that the
            installed transformers knows, or one that is quantised already.
    """
    import torch
    import transformers

    file = _config_file(model_dir)
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    except Exception as error:  # a config can be wrong in many ways
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"{file}: not understood by transformers {_version()}: {why}") from error
    name = model_class(config)
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise InputError(f"{file}: transformers {_version()} has no {name}")
    try:
        with torch.device("meta"):
            model = architecture._from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"{file}: {name} cannot be built from it: {why}") from error
    if quantization_config is not None:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
        # As in from_pretrained, where they are not tied yet: it keeps the last of all parameters.
        _untie(model)
        quantizer.preprocess_model(model, device_map=dict(device_map or {"": 0}))
        model.tie_weights()
    return model


def _untie(model: Any) -> None:
    from torch import nn

    for name in model.all_tied_weights_keys:
        module, _, leaf = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(model.get_submodule(module), leaf, nn.Parameter(tied.detach().clone(), False))


def bnb_config(quant: str, *, offload: bool = False) -> Any:
    """The ``BitsAndBytesConfig`` of "nf4" (double quantisation) or "int8"; ``None`` for "bf16"."""
    if quant == "bf16":
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**bnb_options(quant, offload=offload))


def model_class(config: Any) -> str:
    """The name of the class that loads this checkpoint as a whole."""
    if config.architectures:
        return str(config.architectures[0])
    from transformers.models.auto import modeling_auto as auto

    for mapping in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        if config.model_type in mapping:
            return str(mapping[config.model_type])
    return type(config).__name__.replace("Config", "Model")


def bnb_options(quant: str, *, offload: bool) -> dict[str, Any]:
    """The arguments of a ``BitsAndBytesConfig``; nothing but plain values."""
    options: dict[str, Any] = {"load_in_8bit": True}
    if quant == "nf4":
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    if offload:
        # Without it transformers refuses a map that names the CPU beside a GPU.
        options["llm_int8_enable_fp32_cpu_offload"] = True
    return options


def _config_file(model_dir: str | os.PathLike[str]) -> Path:
    if "quantization_config" in read_config(model_dir):
        file = Path(model_dir) / CONFIG
        raise InputError(f"{file}: a quantised checkpoint. Name the one that it was made from")
    return Path(model_dir) / CONFIG


def _version() -> str:
    import transformers

    return str(transformers.__version__)


# -- its tensors --------------------------------------------------------------------------------


def tensor_sizes(model: Any) -> tuple[TensorSize, ...]:
    """Every tensor that ``model`` holds once it is loaded; tied ones once, by their first name.

    ``model`` is on meta, from `meta_model`; bitsandbytes' layers are not quantised yet there, and
    counted as they will be.
    """
    found: list[TensorSize] = []
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
                    found.append(TensorSize(prefix + name, size, buffer=True))
                else:
                    found += _parameter(prefix + name, tensor, module)
    return tuple(found)


def _parameter(name: str, tensor: Any, module: Any) -> Iterator[TensorSize]:
    kind = type(tensor).__name__
    if kind == "Params4bit":
        numbers = module.in_features * module.out_features
        blocks = -(-numbers // tensor.blocksize)
        yield TensorSize(name, -(-numbers // 2))
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
        yield TensorSize(name, tensor.numel() * 2)  # bfloat16, whatever the replaced layer says


def adapter_sizes(adapter_dir: str | os.PathLike[str]) -> tuple[TensorSize, ...]:
    """The tensors of an adapter as PEFT loads them: in float32, on the GPU.

    Of ``adapter_model.safetensors`` only the header is read.

    Raises:
        InputError: the folder holds no such adapter.
    """
    entries = adapter_header(adapter_dir).tensors.values()
    return tuple(TensorSize(entry.name, 4 * entry.numel) for entry in entries)


# -- the KV cache -------------------------------------------------------------------------------


def kv_widths(model: Any) -> dict[int, int]:
    """For each decoder layer that keeps keys and values, how many numbers each is a token."""
    text = model.config.get_text_config()
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    widths = {}
    for name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.self_attn$", name)
        if layer is None or part_of(name) != LAYERS:
            continue
        if int(layer[1]) < text.num_hidden_layers - shared:
            widths[int(layer[1])] = int(module.k_proj.out_features)
    return widths


def kv_cache_bytes(model: Any, steps: Iterable[int]) -> int:
    """Bytes that transformers' own ``DynamicCache`` holds after these steps, in bfloat16.

    ``steps`` are the numbers of tokens of one forward after the other.  What is counted are
    storages: after a long prompt in one step, the keys and values that a sliding layer keeps are
    views of those of the whole prompt, which stay until the next step.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    widths = kv_widths(model)
    for tokens in steps:
        for index, width in widths.items():
            both = torch.empty((2, 1, 1, tokens, width), dtype=torch.bfloat16, device="meta")
            cache.update(*both, index)
    storages = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
