"""Gradient checkpointing does not cover the projection of the per-layer embeddings.

``project_per_layer_inputs`` projects the token embeddings for all layers at once, outside of the
decoder layers, and normalizes the result in float32.  QLoRA makes the token embeddings require a
gradient, so that checkpoints of the layers work, and then the float32 values are kept for the whole
step: 35 KiB a token in E2B, 280 MiB for 8,192 tokens.

The fix calls the projection as transformers calls a decoder layer.  Its inputs are kept, and it is
computed again in backward.  If its weights were changed in place since, backward raises PyTorch's
error, as it does without the fix.
"""

from __future__ import annotations

from itertools import chain
from typing import Any
from weakref import ref

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...errors import ModelError

PATCH = Patch(
    name="ple_training_memory",
    symptom="torch.OutOfMemoryError in training of E2B or E4B, in spite of gradient checkpointing",
    affects=("transformers",),
    kind=Kind.MEMORY,
    unreported="Found by counting the memory of a training step; no report is known upstream.",
)

_MODULE = "transformers.models.gemma4.modeling_gemma4"
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: a weight of the projection of the per-layer embeddings was changed after the "
    "forward; call backward before the change"
)


@PATCH.probe
def the_projection_is_not_checkpointed() -> Finding:
    code = code_at(_MODULE, "Gemma4TextModel.project_per_layer_inputs")
    return fixed_if(mentions(code, "checkpoint"), "transformers checkpoints the projection")


@PATCH.around(_MODULE, "Gemma4TextModel.project_per_layer_inputs")
def project_per_layer_inputs(
    original: Any, self: Any, inputs_embeds: Any, *args: Any, **kwargs: Any
) -> Any:
    checkpoint = getattr(self, "_gradient_checkpointing_func", None)
    is_used = self.training and self.gradient_checkpointing and inputs_embeds.requires_grad
    if checkpoint is None or not is_used:
        return original(self, inputs_embeds, *args, **kwargs)
    modules = (self.per_layer_model_projection, self.per_layer_projection_norm)
    if any(map(_is_changed, modules)):  # what users add runs once for each forward
        return original(self, inputs_embeds, *args, **kwargs)
    weights = chain.from_iterable(module.parameters() for module in modules)
    versions = [(ref(each), each._version) for each in weights]

    def project(*inputs: Any) -> Any:
        for weight, version in versions:
            now = weight()
            if now is not None and now._version != version:
                raise ModelError(_MODIFIED)
        return original(self, *inputs, **kwargs)

    return checkpoint(project, inputs_embeds, *args)


def _is_changed(module: Any) -> bool:
    """Whether it has hooks or a forward of its own, apart from accelerate's."""
    has_forward = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    return bool(has_forward or module._forward_hooks or module._forward_pre_hooks)
