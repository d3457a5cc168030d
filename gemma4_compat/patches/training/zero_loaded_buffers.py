"""With DeepSpeed ZeRO-3, transformers does not load the buffers of a checkpoint.

Gemma 4 has weights that are buffers: each decoder layer multiplies its output by ``layer_scalar``.
In transformers 5.5, the loader for ZeRO-3 loads the parameters of a module, and its buffers only on
the first process and beside a parameter.  The others keep their initial values.  There is no error,
but the loss is far too high.

The fix loads the buffers of all modules after the original, on all processes.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from .._code import code_at, mentions

_DEEPSPEED = "transformers.integrations.deepspeed"

PATCH = Patch(
    name="zero_loaded_buffers",
    symptom=(
        "with DeepSpeed ZeRO-3, an unquantized model has a far too high loss, without an error"
    ),
    affects=("transformers<5.6",),
    changes="The loader of transformers for ZeRO-3 loads the checkpoint's buffers, too.",
    unreported="Not searched for; transformers 5.6 loads them.",
)


@PATCH.probe
def buffers_are_left_out() -> Finding:
    code = code_at(_DEEPSPEED, "_load_state_dict_into_zero3_model")
    return fixed_if(mentions(code, "named_buffers"), "buffers are loaded")


@PATCH.around(_DEEPSPEED, "_load_state_dict_into_zero3_model")
def load_state_dict(
    original: Any, model_to_load: Any, state_dict: Any, load_config: Any = None
) -> Any:
    import torch
    from transformers.integrations import deepspeed

    errors, missing = original(model_to_load, state_dict, load_config)
    buffers = dict(model_to_load.named_buffers())
    kinds = {name.rpartition(".")[2] for name in buffers}
    found = {name: t for name, t in state_dict.items() if name.rpartition(".")[2] in kinds}
    if mapping := getattr(load_config, "weight_mapping", None):
        found = deepspeed._apply_weight_conversions_to_state_dict(model_to_load, found, mapping)
    prefix = getattr(model_to_load, "base_model_prefix", "")
    for name, tensor in found.items():
        # the checkpoint may not have the prefix
        full = f"{prefix}.{name}" if f"{prefix}.{name}" in buffers else name
        if full in buffers:
            with torch.no_grad():
                buffers[full].copy_(tensor)
            buffers[full]._is_hf_initialized = True
            missing.discard(full)
    return errors, missing
