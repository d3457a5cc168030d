"""Computes the attention of some forwards in another way than ``attn_implementation="sdpa"`` does.

A model's attention layer looks its function up in ``ALL_ATTENTION_FUNCTIONS``, which all models
share.  Only during a forward of the family's layer, in its thread, does the lookup give another
function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...runtime.kernels.replacing import plain
from .._code import code_at, mentions
from .._families import Family

_SDPA = "transformers.integrations.sdpa_attention"


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
    thread = threading.local()  # .inside: whether this thread is in a forward that it applies to

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
        before = getattr(thread, "inside", False)
        try:
            thread.inside = True
            return original(self, hidden_states, *args, **kwargs)
        finally:
            thread.inside = before

    @patch.around("transformers.modeling_utils", "AttentionInterface.__getitem__")
    def getitem(original: Any, self: Any, key: Any) -> Any:
        import torch

        function = original(self, key)
        if torch.compiler.is_compiling() or not getattr(thread, "inside", False):
            return function
        usual = sys.modules[_SDPA].sdpa_attention_forward
        return partial(attention, function) if function is usual else function
