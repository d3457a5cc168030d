"""Masks made from the token ids are on another GPU than the embeddings that they mask.

accelerate sends the inputs of a model with a device map to the main device, the first GPU in the
map.  The output of the token embeddings is on the GPU that the map gives them.  If these differ,
Gemma 4 fails at once: it looks up its per-layer embeddings (PLE) with ``torch.where(mask, pad,
embeddings)``, and the mask is on the device of ``input_ids``.  Models that attend to images in both
directions make a second mask, of image blocks, on the device of ``mm_token_type_ids``.

The fix first sends token ids, token types and given embeddings to the GPU of the token embeddings.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.hooks import hooks_of

PATCH = Patch(
    name="ple_mask_device",
    symptom=(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        "and cuda:1 (when the token embeddings are not on the first GPU of the device map)"
    ),
    affects=("transformers<5.9", "accelerate"),
    links=(
        "https://github.com/huggingface/transformers/issues/45823",
        "https://github.com/huggingface/transformers/pull/45826",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def masks_stay_with_the_ids() -> Finding:
    """Look for a function that the module no longer has in releases with the fix."""
    from transformers.models.gemma4 import modeling_gemma4

    stays = hasattr(modeling_gemma4, "create_causal_mask_mapping")
    return fixed_if(not stays, "transformers moves the mask to the per-layer embeddings")


@PATCH.around(_MODEL, "Gemma4Model.forward")
def model_forward(
    original: Any, self: Any, input_ids: Any = None, *args: Any, **kwargs: Any
) -> Any:
    device = _device_of_embeddings(self)
    if device is not None:
        if input_ids is not None:
            input_ids = input_ids.to(device)
        for name in ("mm_token_type_ids", "inputs_embeds"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].to(device)
    return original(self, input_ids, *args, **kwargs)


def _device_of_embeddings(model: Any) -> Any | None:
    """The execution device of the token embeddings, which is also the device of their output."""
    hooks = hooks_of(model.get_input_embeddings())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((device for device in devices if device is not None), None)
