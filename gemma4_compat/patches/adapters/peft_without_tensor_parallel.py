"""PEFT 0.19 prepares tensor parallelism for every LoRA adapter that several processes load.

Where ``torch.distributed`` is initialized (``accelerate launch``, DDP, FSDP), PEFT shards a loaded
adapter as the model is sharded.  It imports the styles of tensor parallelism from transformers, and
reads the device of each base weight, before it checks whether a layer is sharded at all.  One of
the styles, ``EmbeddingParallel``, is gone in transformers 5.16, so loading raises.  The experts of
26B-A4B have no ``weight``, so an adapter on them raises with any transformers.

The fix checks first.  transformers marks the modules of a model that it shards, and no others.  For
such a model, PEFT's own code runs.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at

PATCH = Patch(
    name="peft_without_tensor_parallel",
    symptom=(
        "loading a LoRA adapter under accelerate launch: ImportError: cannot import name "
        "'EmbeddingParallel' from 'transformers.integrations.tensor_parallel'; or, on experts: "
        "AttributeError: 'Gemma4TextExperts' object has no attribute 'weight'"
    ),
    affects=("transformers", "peft>=0.19,<0.20"),
    links=(
        "https://github.com/huggingface/peft/pull/3261",
        "https://github.com/huggingface/peft/issues/3628",
    ),
)

_MODULE = "peft.utils.save_and_load"
_SHARD = "_maybe_shard_state_dict_for_tp"
_STYLES = "transformers.integrations.tensor_parallel"
#: The first is what PEFT reads, and is gone in transformers 5.16.
_MARKS = ("_hf_tp_plan", "_is_hooked")


@PATCH.probe
def imports_before_it_checks() -> Finding:
    """Check whether the import comes before the loop over the layers."""
    names = code_at(_MODULE, _SHARD).co_names  # in the order of their first use
    if _STYLES not in names or "named_modules" not in names:
        return drifted(f"{_SHARD} does not import the styles, or does not go through the layers")
    first = names.index("named_modules") < names.index(_STYLES)
    return fixed_if(first, "PEFT checks first whether a layer is sharded")


@PATCH.around(_MODULE, _SHARD)
def shard_state_dict(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    if any(mark in vars(module) for module in model.modules() for mark in _MARKS):
        original(model, *args, **kwargs)
