"""``prepare_model_for_kbit_training`` doubles the largest tensors that 4 bits leave alone.

PEFT freezes the base model and casts to float32 every half-precision parameter that is not a
``Params4bit``: meant are layer norms and the head.  It hits two giants as well.  The
per-layer-embedding table of E2B, E4B and Gemma 3n is an ``nn.Embedding``, which bitsandbytes does
not quantise: E2B's grows from 4.4 to 8.8 GiB, more than the rest of the 4-bit model takes.  So are
the fused experts of 26B-A4B, 42 GiB of them.  Both are frozen, so nothing is gained but memory
lost; an offloaded table is cast anew in every forward.

The fix leaves these two alone and treats everything else as before.  Looked-up rows are exact in
either dtype, since the factor they are scaled with is a power of two in all released models, and
what is added to them is float32, as is their sum.  Under autocast nothing would make it float32,
so the rows are cast.  Experts get their inputs in their own dtype, which is how bitsandbytes' 4-bit
layers beside them compute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._shadow import shadowed

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="kbit_training_upcast",
    symptom=(
        "out of memory in prepare_model_for_kbit_training: the per-layer embeddings (E2B: 4.4 GiB) "
        "and the experts of 26B-A4B (42 GiB) are cast to float32"
    ),
    affects=("transformers", "peft"),
    changes=(
        "PEFT's prepare_model_for_kbit_training leaves the per-layer-embedding table and the fused "
        "experts of Gemma 4 and Gemma 3n in their dtype, frozen like the rest, and says at level "
        "INFO what that saves.  Hooks on these modules see to the dtypes around them."
    ),
    unreported=("Only reports about other models are known upstream (peft #816 and #1149)."),
)

_TABLE = "embed_tokens_per_layer"


@PATCH.probe
def tables_are_cast() -> Finding:
    """Prepare a module with a table and look at its dtype."""
    import inspect

    import torch
    from peft.utils.other import prepare_model_for_kbit_training as prepare

    options: dict[str, bool] = {"use_gradient_checkpointing": False}
    if "auto_clear_cache" in inspect.signature(prepare).parameters:
        options["auto_clear_cache"] = False  # it would ask for a GPU, and so initialise CUDA
    table = torch.nn.Embedding(1, 1, dtype=torch.bfloat16)
    prepare(torch.nn.ModuleDict({_TABLE: table}), **options)
    if table.weight.dtype == torch.bfloat16:
        return fixed("prepare_model_for_kbit_training leaves the table in its dtype")
    return broken()


@PATCH.replaces("peft.utils.other", "prepare_model_for_kbit_training")
def prepare_model_for_kbit_training(original: Any) -> Any:
    @wraps(original)
    def prepare_model_for_kbit_training(model: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {id(parameter): parameter for _, _, parameter in _giants(model)}
        if not kept:
            return original(model, *args, **kwargs)
        every = model.parameters

        def parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return (each for each in every(*args, **kwargs) if id(each) not in kept)

        # What is to be cast is asked of parameters(), what is to be frozen of named_parameters().
        with shadowed(model, parameters=parameters):
            result = original(model, *args, **kwargs)
        for module, hook, _ in _giants(model):
            _attach(module, hook)
        size = sum(parameter.numel() * parameter.element_size() for parameter in kept.values())
        logger.info(
            "%d parameters (per-layer embeddings or experts) stay in half precision: %.3g GiB less",
            len(kept),
            size / 2**30,
        )
        return result

    return prepare_model_for_kbit_training


def _giants(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Per-layer embeddings and fused experts in half precision: module, its hook, parameter."""
    import torch
    from torch.nn import Embedding

    half = (torch.float16, torch.bfloat16)
    for module in model.modules():
        table = module._modules.get(_TABLE)
        if table is not None:
            # PEFT's wrappers hold the original first.
            inner = next((each for each in table.modules() if isinstance(each, Embedding)), None)
            if inner is not None and inner.weight.dtype in half:
                yield inner, _rows_under_autocast, inner.weight
        elif type(module).__name__.startswith("Gemma") and type(module).__name__.endswith(
            "Experts"
        ):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3 and parameter.dtype in half:
                    yield module, _inputs_of_experts, parameter


def _attach(module: Any, hook: Any) -> None:
    hooks = module._forward_hooks if hook is _rows_under_autocast else module._forward_pre_hooks
    if hook in hooks.values():
        return
    if hook is _rows_under_autocast:
        module.register_forward_hook(hook)
    else:
        module.register_forward_pre_hook(hook)


def _rows_under_autocast(module: Any, args: Any, output: Any) -> Any:
    """Give the rows the dtype that they would have with a float32 table."""
    import torch

    return output.float() if torch.is_autocast_enabled(output.device.type) else output


def _inputs_of_experts(module: Any, args: Any) -> Any:
    """Give the experts' inputs their weights' dtype; autocast does so itself."""
    import torch

    states, *rest = args
    if torch.is_autocast_enabled(states.device.type):
        return args
    return (states.to(module.gate_up_proj.dtype), *rest)
