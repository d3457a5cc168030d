"""For each token, a model without experts walks its modules twice, to switch its experts.

On a GPU, ``generate`` uses another implementation of experts to decode than for the prompt.  Before
5.14 it switches before the forward of each token, and back after it.  A switch visits all modules,
also those of a LoRA adapter: with one, E2B loses as much time as the GPU computes.  Gemma 4's code
has experts, so that models without them, such as E2B, switch as well.

The fix does not switch such models.  Those with experts, such as 26B-A4B, switch as before;
so does a model to which another module was attached, because that may have experts.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_at
from ...model.parts import is_ours

PATCH = Patch(
    name="experts_switch_overhead",
    kind=Kind.EXACT,
    symptom="on a GPU, each token of generate waits some ms for set_experts_implementation",
    affects=("transformers<5.14",),
    links=("https://github.com/huggingface/transformers/pull/47097",),
)

_MODULE, _NAME = "transformers.generation.utils", "GenerationMixin._optimize_model_for_decode"


@PATCH.probe
def each_token_switches() -> Finding:
    """Check whether the function asks submodels, as it does since it is called once."""
    names = code_at(_MODULE, _NAME).co_names
    return fixed_if("get_experts_implementation" in names, "the implementation is switched once")


@PATCH.around(_MODULE, _NAME)
def optimize_model_for_decode(original: Any, self: Any) -> Any:
    return original(self) if not is_ours(self) or _may_have_experts(self) else nullcontext()


def _may_have_experts(model: Any) -> bool:
    if model._modules.keys() - {"model", "lm_head"}:  # the user attached another model
        return True
    return bool(getattr(model.config.get_text_config(decoder=True), "enable_moe_block", False))
