"""``load_in_4bit`` does not quantize the experts of 26B-A4B.

bitsandbytes quantizes ``nn.Linear`` modules.  ``Gemma4TextExperts`` holds all experts of a layer in
two three-dimensional parameters, so transformers skips them.  Nine tenths of the model, some 42
GiB, are loaded in bfloat16 although the config asks for four bits.

The fix makes each of the two parameters a ``Params4bit``, as the weight of a ``Linear4bit`` is.
The loader quantizes it as soon as it is read, so there is never more than one fused tensor in
bfloat16 on the device.  The class of the module stays; its forward dequantizes what the tokens are
routed to.  In a file, the statistics of the parameter follow its name, as those of a
``Linear4bit`` do.  For up to eight tokens on a GPU, two CUDA kernels multiply with the packed
experts.  They are compiled at run time; where this fails, bitsandbytes' kernels are used.

Loading warns with the sizes.  Experts that the config excludes, or whose number of values is no
multiple of the blocksize, stay as they are.  The patch ends when the quantizer handles experts.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.fingerprint import is_measured
from ...engine.gate import holds
from ...engine.patch import Copied
from ...engine.probing import code_of, mentions
from ...runtime.experts.forward import Upstream, forward_4bit
from ...runtime.experts.packed import (
    FUSED,
    dequantize,
    experts_in,
    fits_in_blocks,
    has_fused_form,
    is_packed,
    packed_parameters,
    quantized,
)
from ...runtime.host.onloading import onloaded

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="fused_experts_4bit",
    kind=Kind.MEMORY,
    symptom=(
        "load_in_4bit of 26B-A4B needs far more memory than expected: the experts stay unquantized "
        "(some 42 GiB in bfloat16)"
    ),
    affects=("transformers", "bitsandbytes"),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1965",
        "https://github.com/unslothai/unsloth/issues/4032",
        "https://github.com/unslothai/unsloth/pull/5432",
    ),
    differs="load_in_4bit quantizes experts that transformers leaves in bfloat16",
)

_QUANTIZER = "transformers.quantizers.quantizer_bnb_4bit"
_INTEGRATION = "transformers.integrations.bitsandbytes"
_EXPERTS = "transformers.models.gemma4.modeling_gemma4"

#: The endings of the tensors that a file has for a parameter in 4 bits.  The longest come first,
#: because old releases of transformers take the first that matches.
_IN_FILES = (
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".nested_quant_map",
    ".nested_absmax", ".quant_map", ".absmax", "",
)  # fmt: skip


@PATCH.probe
def quantizer_skips_experts() -> Finding:
    """Check whether the quantizer mentions experts, and for the methods that it loads with."""
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    code = code_of(Bnb4BitHfQuantizer.param_needs_quantization)
    return fixed_if(mentions(code, "xperts"), "the 4-bit quantizer handles experts itself")


@PATCH.on_revert
def warn_of_packed_experts() -> None:
    if any(is_packed(module._parameters.get(FUSED[0])) for module in _quantized):
        logger.warning(
            "fused_experts_4bit is off now, while models with experts in 4 bits are loaded. Do not "
            "run or save these models before it is on again: without it, a forward raises an "
            "error, and a saved file cannot be loaded."
        )


# -- loading ------------------------------------------------------------------------------------


@PATCH.around(_QUANTIZER, "Bnb4BitHfQuantizer._process_model_before_weight_loading")
def process_model_before_weight_loading(
    original: Any, self: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    result = original(self, model, *args, **kwargs)
    quantize_while_loading(self, model, Gemma4TextExperts, kwargs.get("checkpoint_files"))
    return result


@PATCH.around(_QUANTIZER, "Bnb4BitHfQuantizer.param_needs_quantization")
def param_needs_quantization(
    original: Any, self: Any, model: Any, param_name: str, **kwargs: Any
) -> Any:
    if original(self, model, param_name, **kwargs):
        return True
    path, _, name = param_name.rpartition(".")
    return name in FUSED and _is_marked(model.get_submodule(path), name)


@PATCH.around(_QUANTIZER, "Bnb4BitHfQuantizer.get_weight_conversions")
def get_weight_conversions(original: Any, self: Any) -> Any:
    conversions = original(self)
    if not vars(self).get("_reads_experts"):
        return conversions
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    conversions = list(conversions)
    for name in (f"experts.{name}" for name in FUSED):
        conversions.append(
            WeightConverter(
                source_patterns=[name + ending for ending in _IN_FILES],
                target_patterns=name,
                operations=[Bnb4bitDeserialize(self)],
            )
        )
    return conversions


@PATCH.around(_INTEGRATION, "Bnb4bitQuantize.convert")
def bnb4bit_quantize_convert(
    original: Any,
    self: Any,
    input_dict: Any,
    full_layer_name: Any = None,
    model: Any = None,
    **kwargs: Any,
) -> Any:
    path, _, leaf = str(full_layer_name).rpartition(".")
    if len(input_dict) != 1 or leaf not in FUSED:
        return original(self, input_dict, full_layer_name, model, **kwargs)
    module = model.get_submodule(path)
    if not _is_marked(module, leaf):
        return original(self, input_dict, full_layer_name, model, **kwargs)
    (value,) = input_dict.values()
    value = value[0] if isinstance(value, list) else value
    module._is_hf_initialized = True
    return {f"{path}.{leaf}": quantized(value, module._parameters[leaf])}


@PATCH.around(_INTEGRATION, "Bnb4bitDeserialize.convert")
def bnb4bit_deserialize_convert(
    original: Any,
    self: Any,
    input_dict: Any,
    model: Any = None,
    full_layer_name: Any = None,
    **kwargs: Any,
) -> Any:
    name = min(input_dict, key=len)
    if name.rpartition(".")[2] not in FUSED or len(input_dict) == 1:
        return original(self, input_dict, model, full_layer_name, **kwargs)
    from bitsandbytes.nn import Params4bit

    tensors = {k: v[0] if isinstance(v, list) else v for k, v in input_dict.items()}
    packed = tensors.pop(name)
    model.get_submodule(full_layer_name.rpartition(".")[0])._is_hf_initialized = True
    return {name: Params4bit.from_prequantized(packed, tensors, device=packed.device)}


def quantize_while_loading(quantizer: Any, model: Any, experts: Any, files: Any = None) -> None:
    """Mark the fused experts of a model on meta, so that the loader quantizes them; warn once.

    ``experts`` is their class; a subclass may have its own forward.  ``files`` are those of the
    checkpoint.  If it is quantized, they tell which experts are.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    modules = {
        name: module
        for name, module in model.named_modules()
        if getattr(type(module), "forward", None) is experts.forward
        and has_fused_form(module)
        and should_convert_module(name, quantizer.modules_to_not_convert)
    }
    if modules and experts.forward not in _forwards:
        return _warn_unquantized(modules, f"another program replaced {experts.__name__}.forward")
    if quantizer.pre_quantized and modules and not _are_packed_in(files):
        return _warn_unquantized(modules, "the checkpoint has them unquantized")
    quantizer._reads_experts = bool(modules) and quantizer.pre_quantized
    refused = {}
    sizes = [0, 0]
    for name, module in modules.items():
        options = quantizer.quantization_config
        parameters = {own: _on_meta(module._parameters[own], options) for own in FUSED}
        if not fits_in_blocks(module, parameters[FUSED[0]].blocksize):
            refused[name] = module
            continue
        for own, parameter in parameters.items():
            before = module._parameters[own]
            sizes[0] += before.numel() * before.element_size()
            sizes[1] += _packed_bytes(before.numel(), parameter)
            if quantizer.pre_quantized:
                parameter.data = parameter.data.to(options.bnb_4bit_quant_storage)
            module._parameters[own] = parameter
        module.compute_dtype = options.bnb_4bit_compute_dtype
        _quantized.add(module)
    if refused:
        _warn_unquantized(refused, "the size of an expert is no multiple of the blocksize")
    if len(modules) > len(refused) and not quantizer.pre_quantized:
        first = next(name for name in modules if name not in refused)
        logger.warning(
            "load_in_4bit quantizes the experts of %d layers, too (fused tensors such as %s): "
            "%.3g GiB become %.3g GiB.  To keep them unquantized, set "
            "BitsAndBytesConfig(llm_int8_skip_modules=['lm_head', 'experts']).",
            len(modules) - len(refused), f"{first}.{FUSED[0]}", sizes[0] / 2**30, sizes[1] / 2**30,
        )  # fmt: skip


def _warn_unquantized(modules: dict[str, Any], why: str) -> None:
    parameters = [module._parameters[own] for module in modules.values() for own in FUSED]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    logger.warning(
        "the experts of %d layers are not quantized (fused tensors such as %s), because %s: they "
        "are loaded in %s and take %.3g GiB.  To find a device map that fits your GPU, run "
        "gemma4-compat plan MODEL --gpu SIZE.",
        len(modules), f"{next(iter(modules))}.{FUSED[0]}", why, " and ".join(sorted(dtypes)),
        size / 2**30,
    )  # fmt: skip


def _on_meta(parameter: Any, options: Any) -> Any:
    """The parameter as one that is quantized when it is moved to a device."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        parameter.data,
        requires_grad=False,
        compress_statistics=options.bnb_4bit_use_double_quant,
        quant_type=options.bnb_4bit_quant_type,
        quant_storage=options.bnb_4bit_quant_storage,
    )


def _packed_bytes(elements: int, parameter: Any) -> int:
    blocks = elements // int(parameter.blocksize)
    return elements // 2 + (blocks + blocks // 64 if parameter.compress_statistics else 4 * blocks)


def _is_marked(module: Any, name: str) -> bool:
    """Whether a parameter of experts is to be quantized, or is quantized."""
    from bitsandbytes.nn import Params4bit

    return isinstance(module._parameters.get(name), Params4bit)


def _are_packed_in(files: Iterable[str] | None) -> bool:
    """Whether the files of a quantized checkpoint have experts in 4 bits."""
    if not files or not all(os.fspath(file).endswith(".safetensors") for file in files):
        return True
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            if any(key.endswith(f"experts.{FUSED[0]}.absmax") for key in opened.keys()):  # noqa: SIM118
                return True
    return False


# -- the loaded model ---------------------------------------------------------------------------


#: What the kernels for a few tokens compute; with other code, transformers' own functions run.
_FEW_TOKENS = (
    Copied(
        "transformers.integrations.moe",
        "batched_mm_experts_forward",
        "365ecdb9ee4a 2469c64fdef5 d8cafca687f2 2ae427542aec cf1bc6a7c963",
    ),
    Copied("transformers.integrations.moe", "_default_apply_gate", "b1f348c827c4"),
)
_forwards: weakref.WeakSet[Any] = weakref.WeakSet()  # those that compute with experts in 4 bits
_quantized: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose experts were loaded in 4 bits


@PATCH.replaces(_EXPERTS, "Gemma4TextExperts.forward")
def experts_forward(original: Any) -> Any:
    import torch

    run: Any = forward_4bit
    upstream = Upstream(original, all(map(is_measured, _FEW_TOKENS)))
    if holds("bitsandbytes<0.50"):  # whose kernels recurse without end in a compiled graph
        run = torch.compiler.disable(forward_4bit)

    @wraps(original)
    def experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_packed(self._parameters.get(FUSED[0])):
            return original(self, *args, **kwargs)
        return run(upstream, self, *args, **kwargs)

    _forwards.add(experts_forward)
    return experts_forward


@PATCH.around(_EXPERTS, "Gemma4TextExperts._save_to_state_dict")
def experts_save_to_state_dict(
    original: Any, self: Any, destination: Any, prefix: str, keep_vars: bool
) -> Any:
    result = original(self, destination, prefix, keep_vars)
    for name, parameter in packed_parameters(self).items():
        for key, value in parameter.quant_state.as_dict(packed=True).items():
            destination[f"{prefix}{name}.{key}"] = value if keep_vars else value.detach()
    return result


@PATCH.around(_INTEGRATION, "dequantize_and_replace")
def dequantize_and_replace(
    original: Any, model: Any, quantization_config: Any = None, dtype: Any = None
) -> Any:
    model = original(model, quantization_config=quantization_config, dtype=dtype)
    for _, module in list(experts_in(model)):
        with onloaded(module, keep_changes=True):
            dequantize(module, dtype)
    return model
