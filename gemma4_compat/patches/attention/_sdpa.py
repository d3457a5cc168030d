"""Computes the attention of some forwards in another way than ``attn_implementation="sdpa"`` does.

Only for such a forward, the layer's code reads another config, which says ``eager``.  So it calls
the ``eager_attention_forward`` of its own module, and other models notice nothing.
``AttentionInterface.register`` does not serve: another name would show in the config and its file,
and the name ``sdpa`` would change the function of all models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

from ...engine import Finding, Part, drifted, fixed_if
from ...engine.probing import code_at, mentions
from ...objects import View
from ...runtime.kernels.replacing import plain
from ...runtime.kernels.watch import is_upstreams, wrapped_by
from .._families import Family

_SDPA, _EAGER = "transformers.integrations.sdpa_attention", "eager_attention_forward"
#: its functions that compute attention
_CALLED = ("sdpa_attention_forward", "repeat_kv", "use_gqa_in_sdpa", "pack_gqa")
#: the options of ``sdpa_attention_forward`` that other ways to compute do not know
_UNKNOWN = ("softcap", "position_bias", "cache")
#: functions of the libraries that compute attention, those that they wrap, and their code
_known: list[Any] = []


def are_known(options: dict[str, Any]) -> bool:
    """Whether these options of ``sdpa_attention_forward`` ask for nothing but the scale."""
    return not options.get("dropout") and all(options.get(name) is None for name in _UNKNOWN)


def replace(
    part: Part,
    family: Family,
    applies: Callable[[Any, Any], bool],
    attention: Callable[..., Any],
    *,
    on_meta: bool = False,
) -> None:
    """Register a probe, and the replacements for a family's attention layers.

    Args:
        part: A part of the patch.
        family: The family of models.
        applies: Gets a layer and its hidden states [batch, tokens, width], on a GPU and without
            gradients; says whether ``attention`` is called.
        attention: Gets ``sdpa_attention_forward``, then what that would get.  If it is called for
            a forward beside that of another patch, one of them gets the other one instead.
        on_meta: Whether tensors on meta count as on a GPU, as in a plan.
    """
    module, layer = family.module, f"{family.prefix}TextAttention"

    @part.probe
    def layer_looks_the_function_up() -> Finding:
        names = code_at(module, f"{layer}.forward").co_names
        if not {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation", _EAGER} <= {*names}:
            return drifted(f"{layer} does not look up its attention function")
        chosen = mentions(code_at(_SDPA, "sdpa_attention_forward"), "decod")
        return fixed_if(chosen, "transformers computes decode steps in another way")

    @part.around(module, f"{layer}.forward")
    def forward(original: Any, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():  # torch.compile warns of functions with a cache
            return original(self, hidden_states, *args, **kwargs)
        planned = on_meta and hidden_states.is_meta and not torch.is_grad_enabled()
        if not (planned or plain()(hidden_states)) or not applies(self, hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        other = vars(self).get("_attention") if type(self) is View else None
        if other is not None:
            self = View(self._module, config=self.config, _attention=_nested(other, attention))
        elif _is_usual(self.config, vars(sys.modules[module])):
            config = View(self.config, _attn_implementation="eager")
            self = View(self, config=config, _attention=attention)
        return original(self, hidden_states, *args, **kwargs)

    part.around(module, _EAGER)(_eager)


def _is_usual(config: Any, names: dict[str, Any]) -> bool:
    """Whether the layer calls transformers' function for ``sdpa``, and would call ours instead.

    Also whether that one calls PyTorch's, and nothing that a user put in the place of either.
    """
    import torch

    if config._attn_implementation != "sdpa":
        return False
    table, own = names["ALL_ATTENTION_FUNCTIONS"], vars(sys.modules[_SDPA])
    usual, eager = own.get("sdpa_attention_forward"), table.get("eager", names[_EAGER])
    return (
        type(eager) is FunctionType
        and eager.__code__.co_filename == _eager.__code__.co_filename
        and table["sdpa"] is usual
        and _are_upstreams([own[name] for name in _CALLED if name in own])
        and torch.nn.functional.scaled_dot_product_attention
        is torch._C._nn.scaled_dot_product_attention
    )


def _are_upstreams(functions: list[Any]) -> bool:
    """Whether these are of the libraries; asked once, since layers ask in each forward."""
    global _known
    chain = [each for function in functions for each in wrapped_by(function)]
    chain += [each.__code__ for each in chain if type(each) is FunctionType]
    if len(chain) == len(_known) and all(map(is_, chain, _known)):
        return True
    if not all(map(is_upstreams, functions)):
        return False
    _known = chain
    return True


def _nested(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda sdpa, *args, **options: outer(partial(inner, sdpa), *args, **options)


def _eager(
    original: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any,
    *args: Any, **options: Any,
) -> Any:  # fmt: skip
    attention = vars(module).get("_attention") if type(module) is View else None
    if attention is None:
        return original(module, query, key, value, attention_mask, *args, **options)
    sdpa = sys.modules[_SDPA].sdpa_attention_forward
    return attention(sdpa, module._module, query, key, value, attention_mask, *args, **options)
