"""KV-sharing layers do not find the keys and values that an earlier layer has stored.

Layers that share keys and values pass them on in a dictionary, ``shared_kv_states``: every decoder
layer gets the same one, some write to it and later ones read.  Code between the layers may replace
the dictionary by a copy.  accelerate's hooks send a layer's arguments to its device, and rebuild
every mapping that ``skip_keys`` does not name.  transformers names it when it
dispatches a model itself, but neither PEFT nor a user's own ``dispatch_model``, ``cpu_offload`` or
``load_checkpoint_and_dispatch`` does.  FSDP2 rebuilds dictionaries when it casts forward inputs.
The layer then writes to a copy.

The fix passes the model's dictionary to every layer inside a container that is not rebuilt.  It
does so where the layer is called, before any hook of the layer gets the dictionary.  The container
does not move the tensors: on the affected releases the layer that reads them does.

A module that wraps the layer, as FSDP1's does, runs before the fix.  FSDP1 with mixed precision
needs transformers 5.9, which does not pass a plain dictionary.
"""

from __future__ import annotations

import sys
from collections import UserDict
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if

PATCH = Patch(
    name="shared_kv_states",
    symptom="KeyError: 22 (E4B), 13 (E2B) or 'sliding_attention' in shared_kv_states[...]",
    affects=("transformers<5.23",),
    note="transformers 5.9.0 already fixes it for FSDP2.",
    links=(
        "https://github.com/huggingface/transformers/issues/45482",
        "https://github.com/huggingface/transformers/issues/45663",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2594",
    ),
)


@PATCH.probe
def container_is_rebuilt() -> Finding:
    """Check whether transformers has its own container for this purpose."""
    # The module of the target has imported cache_utils.
    has_own = hasattr(sys.modules.get("transformers.cache_utils"), "KVSharingDict")
    return fixed_if(has_own, "transformers passes a container that survives hooks")


class _Shared(UserDict[Any, Any]):
    """Holds the given dictionary itself, not a copy, during one call of a layer.

    FSDP2 rebuilds every ``dict``, and accelerate every ``Mapping`` without a method ``to``.
    """

    def __init__(self, states: Any) -> None:
        self.data = states

    def to(self, *args: Any, **kwargs: Any) -> _Shared:
        """Do not move the tensors, because layers on other devices hold them, too."""
        return self


@PATCH.replaces("transformers.modeling_layers", "GradientCheckpointingLayer.__call__")
def layer_call(original: Any) -> Any:
    """The layers of Gemma 4, its variants and Gemma 3n inherit it, and those of other models."""

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = kwargs.get("shared_kv_states")
        if states is not None and isinstance(states, (dict, UserDict)):  # that from 5.9
            kwargs["shared_kv_states"] = _Shared(states)
        return original(self, *args, **kwargs)

    return __call__
