"""Sound under autocast fails where its features have another dtype than the token embeddings.

``Gemma4Model.forward`` casts the features of images to the dtype of the embeddings that they
replace, but not those of sound, and ``masked_scatter`` wants one dtype.  PEFT's
``prepare_model_for_kbit_training`` makes the embeddings float32; the tower computes in half
precision.  The fix casts the features of sound, too, as transformers does since 5.15.
"""

from __future__ import annotations

import dis
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at
from ...objects import View

PATCH = Patch(
    name="audio_features_dtype",
    symptom=(
        "sound in QLoRA, or under autocast with float32 weights: masked_scatter: expected self and "
        "source to have same dtypes but got Float and BFloat16 (or Half)"
    ),
    affects=("transformers<5.15",),
    links=(
        "https://github.com/unslothai/unsloth/issues/7224",
        "https://github.com/unslothai/notebooks/issues/303",
        "https://github.com/unslothai/unsloth-zoo/pull/925",
    ),
)

_FORWARD = "transformers.models.gemma4.modeling_gemma4", "Gemma4Model.forward"


@PATCH.probe
def only_images_are_cast() -> Finding:
    """Count where the forward reads a dtype: for images, for videos, and for sound."""
    reads = [each.argval for each in dis.get_instructions(code_at(*_FORWARD))].count("dtype")
    return fixed_if(reads > 2, "Gemma4Model.forward casts the features of sound")


@PATCH.around(*_FORWARD)
def model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("input_features") is None:
        return original(self, *args, **kwargs)
    given = kwargs.get("inputs_embeds")
    dtypes = [] if given is None else [given.dtype]

    def embed(*args: Any, **kwargs: Any) -> Any:
        embeddings = self.get_input_embeddings()(*args, **kwargs)
        dtypes.append(embeddings.dtype)
        return embeddings

    def get_audio_features(*args: Any, **kwargs: Any) -> Any:
        found = self.get_audio_features(*args, **kwargs)
        return View(found, pooler_output=found.pooler_output.to(dtypes[0]))

    view = View(self, get_input_embeddings=lambda: embed, get_audio_features=get_audio_features)
    return original(view, *args, **kwargs)
