"""Sound under autocast fails where the token embeddings have another dtype than its features.

``Gemma4Model.forward`` puts the features of images, videos and sound in the place of token
embeddings.  It casts the features of images and videos to the dtype of the embeddings, but not
those of sound.  ``masked_scatter`` wants one dtype.  In QLoRA they differ: PEFT's
``prepare_model_for_kbit_training`` makes the embeddings float32, and under autocast the audio tower
computes in half precision.

The fix casts the features of sound, too, as transformers does since 5.15.
"""

from __future__ import annotations

from functools import partial

from ...engine import Patch
from .._families import GEMMA4
from ._features_dtype import model_forward, only_images_are_cast

PATCH = Patch(
    name="audio_features_dtype",
    symptom=(
        "sound in QLoRA, or under autocast with float32 weights: masked_scatter: expected self and "
        "source to have same dtypes but got Float and BFloat16 (or Half)"
    ),
    affects=("transformers<5.15",),
    changes=(
        "Gemma4Model.forward casts the features of sound to the dtype of the token embeddings."
    ),
    links=(
        "https://github.com/unslothai/unsloth/issues/7224",
        "https://github.com/unslothai/notebooks/issues/303",
        "https://github.com/unslothai/unsloth-zoo/pull/925",
    ),
)

PATCH.probe(partial(only_images_are_cast, GEMMA4))
PATCH.around(GEMMA4.module, f"{GEMMA4.prefix}Model.forward")(model_forward)
