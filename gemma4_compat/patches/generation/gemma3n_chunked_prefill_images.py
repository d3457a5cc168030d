"""With ``prefill_chunk_size``, Gemma 3n does not get images and sound.

This is the same bug as in Gemma 4 (see ``chunked_prefill_images``), and for images the fix is the
same, too.  The forward of Gemma 3n pads the features of sound after it has got them, so the fix
raises ValueError for sound in more than one chunk, as transformers 5.23.0 does.
"""

from __future__ import annotations

from ...engine import Patch
from .._families import GEMMA3N
from ._chunked_prefill import mend

PATCH = Patch(
    name="gemma3n_chunked_prefill_images",
    symptom=(
        "Gemma 3n: generate(prefill_chunk_size=...) ignores images and sound, without an error"
    ),
    affects=("transformers<5.23",),
    changes=(
        "generate of Gemma 3n with prefill_chunk_size gives each chunk the features of its images, "
        "and raises ValueError for sound in more than one chunk."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)

mend(PATCH, GEMMA3N, "image")
