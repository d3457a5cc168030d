"""Computes the attention of some forwards in another way than ``attn_implementation="sdpa"`` does.

A model's attention layer looks its function up in ``ALL_ATTENTION_FUNCTIONS``, which all models
share.  Only during a forward of the family's layer, in its thread, does the lookup give another
function.  ``AttentionInterface.register`` does not serve: another name would show in the config and
its file, and the name ``sdpa`` would change the function of all models.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...runtime.kernels.replacing import plain
from .._code import code_at, mentions
from .._families import Family

_SDPA = "transformers.integrations.sdpa_attention"
#: .inside: the layer whose forward this thread is in, and what computes its attention, or ``None``
_thread = threading.local()


def replace(
    patch: Patch,
    family: Family,
    applies: Callable[[Any, Any], bool],
    attention: Callable[..., Any],
) -> None:
    """Register a probe, and the replacements for a family's attention layers.

    Args:
        patch: The patch.
        family: The family of models.
        applies: Gets a layer and its hidden states [batch, tokens, width], on a GPU and without
            gradients; says whether ``attention`` is called.
        attention: Gets ``sdpa_attention_forward``, then what that would get.
    """
    module, layer = family.module, f"{family.prefix}TextAttention"

    @patch.probe
    def layer_looks_the_function_up() -> Finding:
        if "ALL_ATTENTION_FUNCTIONS" not in code_at(module, f"{layer}.forward").co_names:
            return drifted(f"{layer} does not look up its attention function")
        chosen = mentions(code_at(_SDPA, "sdpa_attention_forward"), "decod")
        return fixed_if(chosen, "transformers computes decode steps in another way")

    @patch.around(module, f"{layer}.forward")
    def forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        compiling = torch.compiler.is_compiling()  # torch.compile warns of functions with a cache
        if compiling or not plain()(hidden_states) or not applies(self, hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        before = getattr(_thread, "inside", None)
        try:
            _thread.inside = self, attention
            return original(self, hidden_states, *args, **kwargs)
        finally:
            _thread.inside = before

    patch.replaces("transformers.modeling_utils", "AttentionInterface.__getitem__")(_lookup)


def _lookup(original: Any) -> Any:
    """The lookup for all patches and families.  Other models pay one Python call for it."""

    def getitem(self: Any, key: Any) -> Any:
        function, inside = usual(self, key), getattr(_thread, "inside", None)
        if inside is None or function is not vars(sys.modules[_SDPA]).get("sdpa_attention_forward"):
            return function
        layer, attention = inside

        def chosen(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is layer:
                return attention(function, module, *args, **kwargs)
            return function(module, *args, **kwargs)  # a hook of the layer runs another model

        return chosen

    usual = original
    while usual.__code__ is getitem.__code__:  # the lookup of another patch
        usual = usual.__wrapped__
    return wraps(original)(getitem)
