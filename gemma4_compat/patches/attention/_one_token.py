"""The replacements of ``one_token_attention`` and of the same patch for other model types."""

from __future__ import annotations

from typing import Any

from ...engine import Patch
from ...runtime.capture.decoding import forget
from ...runtime.kernels import one_token_attention
from ._sdpa import replace

#: The options of ``sdpa_attention_forward`` that the kernel does not know.
_UNKNOWN = ("softcap", "position_bias", "cache")


def mend(patch: Patch, module: str, layer: str) -> None:
    """Register probe and replacements for this attention class of a module."""
    replace(patch, module, layer, _is_one_token, _attention)
    patch.on_revert(forget)


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
