"""The patch ``one_token_attention`` for each family of models."""

from __future__ import annotations

from typing import Any

from ...engine import Kind, Patch
from ...runtime.capture.decoding import forget
from ...runtime.kernels import one_token_attention
from .._families import Family
from ._sdpa import replace

#: The options of ``sdpa_attention_forward`` that the kernel does not know.
_UNKNOWN = ("softcap", "position_bias", "cache")


def patch_of(family: Family, name: str, symptom: str, unreported: str) -> Patch:
    """The patch for a family's attention class."""
    patch = Patch(
        name=name,
        kind=Kind.FAST,
        symptom=symptom,
        affects=(family.requirement,),
        changes=(
            f"On a GPU, the attention of {family.name} in decode steps is computed in a kernel of "
            "this package if attn_implementation is sdpa.  The result differs by rounding."
        ),
        note="Compute capabilities other than 9.0 were not measured.",
        unreported=unreported,
    )
    replace(patch, family, _is_one_token, _attention)
    patch.on_revert(forget)
    return patch


def _is_one_token(layer: Any, hidden_states: Any) -> bool:
    return bool(hidden_states.shape[1] == 1)


def _attention(
    sdpa: Any, layer: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    if not options.get("dropout") and all(options.get(name) is None for name in _UNKNOWN):
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        output = one_token_attention.attention(query, key, value, mask, scale)
        if output is not None:
            return output, None
    return sdpa(layer, query, key, value, mask, **options)
