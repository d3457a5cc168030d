"""``prepare_model_for_kbit_training`` doubles the size of the largest unquantized tensors.

PEFT freezes the base model and casts every half-precision parameter that is not a ``Params4bit`` to
float32.  This is meant for layer norms and the head, but it also casts two very large tensors.  The
per-layer-embedding table of E2B, E4B and Gemma 3n is an ``nn.Embedding``, which bitsandbytes does
not quantize: E2B's table grows from 4.4 to 8.8 GiB, which is more than the rest of the 4-bit model.
The fused experts of 26B-A4B, 42 GiB, are not quantized either.  Both are frozen, so the cast only
costs memory; an offloaded table is cast again in every forward.

The fix keeps these two in their dtype as long as they are frozen.  A trainable copy, through
``modules_to_save``, is float32 as in PEFT, and what is unfrozen later becomes float32 in the next
forward.  The embedding rows are exact in either dtype, because
their scale is a power of two in all released models; the tensor added to them is float32, and so is
the sum.  Under autocast the sum would not be float32, so the rows are cast.  Experts get their
inputs in their own dtype, as bitsandbytes' 4-bit layers compute, too.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...objects import shadowed

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="kbit_training_upcast",
    symptom=(
        "out of memory in prepare_model_for_kbit_training: the per-layer embeddings (E2B: 4.4 GiB) "
        "and the experts of 26B-A4B (42 GiB) are cast to float32"
    ),
    affects=("transformers", "peft"),
    unreported=("Only reports about other models are known upstream (peft #816 and #1149)."),
)

_TABLE = "embed_tokens_per_layer"


@PATCH.probe
def tables_are_cast() -> Finding:
    """Prepare a module with a table and check the table's dtype."""
    import torch
    from peft.utils.other import prepare_model_for_kbit_training as prepare

    options: dict[str, bool] = {"use_gradient_checkpointing": False}
    if "auto_clear_cache" in inspect.signature(prepare).parameters:
        options["auto_clear_cache"] = False  # clearing would initialize CUDA
    table = torch.nn.Embedding(1, 1, dtype=torch.bfloat16)
    prepare(torch.nn.ModuleDict({_TABLE: table}), **options)
    stays = table.weight.dtype == torch.bfloat16
    return fixed_if(stays, "prepare_model_for_kbit_training leaves the table in its dtype")


@PATCH.around("peft.utils.other", "prepare_model_for_kbit_training")
def prepare_model_for_kbit_training(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    kept = {id(parameter): parameter for _, _, parameter in _large_tensors(model)}
    if not kept:
        return original(model, *args, **kwargs)
    all_parameters = model.parameters

    def parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return (p for p in all_parameters(*args, **kwargs) if id(p) not in kept)

    # PEFT casts the tensors of parameters(), and freezes those of named_parameters().
    with shadowed(model, parameters=parameters):
        result = original(model, *args, **kwargs)
    for module, hook, _ in _large_tensors(model):
        _attach(module, hook)
    size = sum(parameter.numel() * parameter.element_size() for parameter in kept.values())
    logger.info(
        "%d parameters (per-layer embeddings or experts) stay in half precision, which saves "
        "%.3g GiB",
        len(kept),
        size / 2**30,
    )
    return result


@PATCH.around("peft.utils.other", "ModulesToSaveWrapper.update")
def modules_to_save_update(
    original: Any, self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    original(self, adapter_name, *args, **kwargs)
    for module in self.modules_to_save[adapter_name].modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(hook in (_rows_under_autocast, _inputs_of_experts) for hook in hooks):
            module.float()


def _large_tensors(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Per-layer embeddings and fused experts in half precision: (module, hook, parameter)."""
    import torch
    from torch.nn import Embedding

    half = (torch.float16, torch.bfloat16)
    for module in model.modules():
        table = module._modules.get(_TABLE)
        if table is not None:
            # In a wrapper of PEFT, the original embedding is the first one.
            inner = next((m for m in table.modules() if isinstance(m, Embedding)), None)
            if inner is not None and inner.weight.dtype in half:
                yield inner, _rows_under_autocast, inner.weight
        elif re.fullmatch("Gemma.*Experts", type(module).__name__) and hasattr(
            module, "gate_up_proj"
        ):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3 and parameter.dtype in half:
                    yield module, _inputs_of_experts, parameter


def _attach(module: Any, hook: Any) -> None:
    if _in_float32 not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_in_float32)
        if hook is _rows_under_autocast:
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook)


def _in_float32(module: Any, args: Any) -> None:
    """Cast what was unfrozen since, in place: an optimizer may have the parameter."""
    import torch

    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad and parameter.itemsize == 2 and not parameter.is_meta:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                _warn_once(str(parameter.dtype))  # DDP and FSDP have buffers of this dtype
            else:
                parameter.data = parameter.data.float()


@cache
def _warn_once(dtype: str) -> None:
    logger.warning(
        "The per-layer embeddings or experts are trained in %s: prepare_model_for_kbit_training "
        "left them in half precision to save memory.  To train them in float32, cast these modules "
        "with float() before you wrap the model, or set GEMMA4_COMPAT_KBIT_TRAINING_UPCAST=0.",
        dtype,
    )


def _rows_under_autocast(module: Any, args: Any, output: Any) -> Any:
    """Cast the rows to float32 under autocast, as a float32 table would give them."""
    import torch

    return output.float() if torch.is_autocast_enabled(output.device.type) else output


def _inputs_of_experts(module: Any, args: Any) -> Any:
    """Cast the experts' inputs to the dtype of their weights, unless autocast does that."""
    import torch

    # A user's own experts may be called by keyword.
    if not args or torch.is_autocast_enabled(args[0].device.type):
        return args
    return (args[0].to(module.gate_up_proj.dtype), *args[1:])
