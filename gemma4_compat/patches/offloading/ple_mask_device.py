"""Masks made from the token ids are on another GPU than the embeddings that they mask.

With a device map, accelerate brings the inputs of the model to the main device, the first GPU in
the map, and the token embeddings to the GPU that the map gives them.  Where that is another one,
Gemma 4 fails at once: its per-layer embeddings (PLE) are looked up for ``torch.where(mask, pad,
embeddings)``, whose mask lies with ``input_ids``.  In the models that attend to images in both
directions a second mask, of image blocks, lies with ``mm_token_type_ids``.

The fix brings ids, token types and ready-made embeddings to the GPU of the embeddings first.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...model.hooks import hooks_of

PATCH = Patch(
    name="ple_mask_device",
    symptom=(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        "and cuda:1 (when the token embeddings are not on the first GPU of the device map)"
    ),
    affects=("transformers<5.9", "accelerate"),
    changes=(
        "Gemma4Model.forward brings input_ids, mm_token_type_ids and inputs_embeds to the device "
        "that the token embeddings execute on, if a device map gave them one."
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45823",
        "https://github.com/huggingface/transformers/pull/45826",
    ),
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"


@PATCH.probe
def masks_stay_with_the_ids() -> Finding:
    """Look for the function whose calls went when the mask was moved."""
    from transformers.models.gemma4 import modeling_gemma4

    if hasattr(modeling_gemma4, "create_causal_mask_mapping"):
        return broken()
    return fixed("the mask of the per-layer embeddings is moved to them")


@PATCH.replaces(_MODEL, "Gemma4Model.forward")
def model_forward(original: Any) -> Any:
    @wraps(original)
    def forward(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        device = _device_of_embeddings(self)
        if device is not None:
            if input_ids is not None:
                input_ids = input_ids.to(device)
            for name in ("mm_token_type_ids", "inputs_embeds"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name].to(device)
        return original(self, input_ids, *args, **kwargs)

    return forward


def _device_of_embeddings(model: Any) -> Any | None:
    """Where the hook of the token embeddings sends their input, and so where their output is."""
    hooks = hooks_of(model.get_input_embeddings())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((device for device in devices if device is not None), None)
