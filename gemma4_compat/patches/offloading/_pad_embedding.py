"""The embedding of the pad token, which a model with per-layer embeddings reads by itself.

``Gemma4Model.forward`` indexes ``language_model.embed_tokens.weight``, outside of the forward of
that module.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, fixed_if
from ...engine.probing import code_at
from ...objects import View

FORWARD = "transformers.models.gemma4.modeling_gemma4", "Gemma4Model.forward"


def weight_is_read_outside_its_module() -> Finding:
    """Check whether the model's forward still reads the embedding's weight."""
    reads = {"language_model", "embed_tokens", "weight"} <= set(code_at(*FORWARD).co_names)
    return fixed_if(not reads, "Gemma4Model.forward no longer reads the weight of its embeddings")


def with_weight(model: Any, weight: Any) -> Any:
    """A view of a ``Gemma4Model`` whose token embeddings have this weight."""
    rows = View(model.language_model.embed_tokens, weight=weight)
    return View(model, language_model=View(model.language_model, embed_tokens=rows))
