"""With ``prefill_chunk_size``, the model does not get images, videos and sound.

``generate(prefill_chunk_size=...)`` prepares each chunk of the prompt as it prepares a decode step.
Gemma 4 gets its images, videos and sound only in the first forward of a generation, which none of
the chunks is.  The placeholders stay embeddings of the pad token.  There is no error, and the
output is that of the prompt without the image.  One chunk that contains the whole prompt is no
exception.

transformers 5.23.0 encodes images and videos first, and gives each chunk the features of its
placeholders.  It raises ValueError for sound.  If the border of two chunks is inside an image, the
tokens of the image in the first chunk cannot attend to those in the second.  This changes the
logits of 12B, 26B-A4B and 31B, in which the tokens of an image attend to each other.

The fix prefills each chunk as a first forward, with the features of its placeholders, also of
sound.  In models whose image tokens attend to each other, a chunk ends before an image that it
cannot contain, and a chunk is as long as an image that is longer than ``prefill_chunk_size``.
"""

from __future__ import annotations

from ...engine import Patch
from .._families import GEMMA4
from ._chunked_prefill import mend

PATCH = Patch(
    name="chunked_prefill_images",
    symptom=(
        "generate(prefill_chunk_size=...) ignores images, videos and sound, without an error; "
        "Chunked prefill cannot split the raw multimodal inputs ['input_features', ...]"
    ),
    affects=("transformers",),
    changes=(
        "generate with prefill_chunk_size gives each chunk the features of its images, videos and "
        "sound.  A chunk of 12B, 26B-A4B and 31B contains the whole of an image, or nothing of it."
    ),
    note=(
        "transformers 5.23.0 prefills images in chunks.  It refuses sound, and divides images "
        "whose tokens attend to each other."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

mend(PATCH, GEMMA4, "image", "video", "audio")
