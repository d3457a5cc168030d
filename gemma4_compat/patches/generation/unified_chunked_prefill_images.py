"""With ``prefill_chunk_size``, Gemma 4 unified does not get images, videos and sound.

This is the same bug as in Gemma 4 (see ``chunked_prefill_images``): each chunk of the prompt is
prepared as a decode step.

The fix is the same, too.
"""

from __future__ import annotations

from ...engine import Patch
from .._families import UNIFIED
from ._chunked_prefill import mend

PATCH = Patch(
    name="unified_chunked_prefill_images",
    symptom=(
        "Gemma 4 unified: generate(prefill_chunk_size=...) ignores images, videos and sound, "
        "without an error"
    ),
    affects=("transformers>=5.10",),
    changes=(
        "generate of Gemma 4 unified with prefill_chunk_size gives each chunk the features of its "
        "images, videos and sound.  A chunk contains the whole of an image, or nothing of it."
    ),
    note=(
        "transformers 5.23.0 prefills images in chunks.  It refuses sound, and divides images "
        "whose tokens attend to each other."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

mend(PATCH, UNIFIED, "image", "video", "audio")
