"""The features of sound in the dtype of the token embeddings that they replace.

Images and videos get it before ``masked_scatter``, which wants one dtype.
"""

from __future__ import annotations

import dis
from typing import Any

from ...engine import Finding, fixed_if
from ...objects import View
from .._code import code_at
from .._families import Family


def only_images_are_cast(family: Family) -> Finding:
    """Count where the forward reads a dtype: once for images, videos and sound each."""
    code = code_at(family.module, f"{family.prefix}Model.forward")
    reads = sum(each.argval == "dtype" for each in dis.get_instructions(code))
    return fixed_if(reads > 2, f"{family.prefix}Model.forward casts the features of sound")


def model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a ``...Model`` with a view of it that casts the features of sound."""
    if kwargs.get("input_features") is None:
        return original(self, *args, **kwargs)
    given = kwargs.get("inputs_embeds")
    dtypes = [] if given is None else [given.dtype]

    def get_input_embeddings() -> Any:
        embedding = self.get_input_embeddings()

        def embed(*args: Any, **kwargs: Any) -> Any:
            embeddings = embedding(*args, **kwargs)
            dtypes.append(embeddings.dtype)
            return embeddings

        return embed

    def get_audio_features(*args: Any, **kwargs: Any) -> Any:
        found = self.get_audio_features(*args, **kwargs)
        return View(found, pooler_output=found.pooler_output.to(dtypes[0]))

    view = View(
        self, get_input_embeddings=get_input_embeddings, get_audio_features=get_audio_features
    )
    return original(view, *args, **kwargs)
