"""KV-sharing layers do not find the keys and values that an earlier layer has left for them.

Layers that share keys and values pass them on in a dictionary, ``shared_kv_states``: every decoder
layer gets the same one, some write to it and later ones read.  What lies between the layers may
not keep it the same one.  accelerate's hooks send a layer's arguments to its device and rebuild
every mapping on the way, unless told its name in ``skip_keys``; transformers does that (from 5.5.3)
when it dispatches a model itself, but neither PEFT nor a user's own ``dispatch_model``,
``cpu_offload`` or ``load_checkpoint_and_dispatch`` does.  FSDP2 rebuilds dictionaries when it
casts forward inputs.  The layer then writes to a copy.

The fix hands every layer the model's dictionary inside a container that is not rebuilt.  It does
so where the layer is called, before any hook on the layer can see the dictionary.  Nothing has to
move the tensors: on the affected releases the layer that reads them does.

A module wrapped around the layer, as by FSDP1, comes before the fix.  FSDP1 with mixed precision
needs transformers 5.9, which passes no plain dictionary.
"""

from __future__ import annotations

import sys
from collections import UserDict
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, fixed

PATCH = Patch(
    name="shared_kv_states",
    symptom="KeyError: 22 (E4B), 13 (E2B) or 'sliding_attention' in shared_kv_states[...]",
    affects=("transformers>=5.5.2,<5.23",),
    changes=(
        "Decoder layers that are called with shared_kv_states get that dictionary inside a "
        "container that neither accelerate's hooks nor FSDP2 copy."
    ),
    note="For FSDP2 it is fixed earlier, in transformers 5.9.0.",
    links=("https://github.com/huggingface/transformers/issues/45482",),
)


@PATCH.probe
def container_is_rebuilt() -> Finding:
    """Look whether transformers has a container of its own for the purpose."""
    # The module of the target has imported it.
    if hasattr(sys.modules.get("transformers.cache_utils"), "KVSharingDict"):
        return fixed("transformers passes a container that survives hooks")
    return broken()


class _Shared(UserDict[Any, Any]):
    """The given dictionary itself, not a copy of it, for the length of one layer's call.

    FSDP2 rebuilds what is a ``dict``, accelerate what is a ``Mapping`` and has no ``to``.
    """

    def __init__(self, states: Any) -> None:
        self.data = states

    def to(self, *args: Any, **kwargs: Any) -> _Shared:
        """Stay: other layers hold the same tensors, on other devices."""
        return self


@PATCH.replaces(
    "transformers.modeling_layers",
    "GradientCheckpointingLayer.__call__",
    when="transformers>=5.5.3",
)
def layer_call(original: Any) -> Any:
    """All decoder layers inherit this one: of Gemma 4, its variants and Gemma 3n."""

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shared_kv_states") is not None:
            kwargs["shared_kv_states"] = _Shared(kwargs["shared_kv_states"])
        return original(self, *args, **kwargs)

    return __call__


@PATCH.replaces(
    "transformers.models.gemma4.modeling_gemma4",
    "Gemma4TextDecoderLayer.__call__",
    when="transformers<5.5.3",
)
def layer_call_by_position(original: Any) -> Any:
    """At first it was a positional argument, the only dictionary beside tensors."""

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_Shared(each) if isinstance(each, dict) else each for each in args)
        return original(self, *args, **kwargs)

    return __call__
