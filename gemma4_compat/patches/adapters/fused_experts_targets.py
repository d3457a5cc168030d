"""Targets such as ``gate_proj`` and ``all-linear`` miss the experts of 26B-A4B, without a warning.

A layer of 26B-A4B has a dense MLP, whose ``gate_proj``, ``up_proj`` and ``down_proj`` are
``nn.Linear`` modules, and also 128 experts.  ``Gemma4TextExperts`` holds all experts of a layer in
two three-dimensional parameters.  ``target_modules`` matches modules, so it matches only the dense
MLP, and nine tenths of the model get no adapter.

This is not a bug to fix: PEFT adapts such parameters if ``target_parameters`` names them.  The
patch adds a warning with these names.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine import Finding, Kind, Patch, drifted, fixed_if
from ...engine.probing import code_of, mentions
from ...model.parts import experts_without_adapter, target_parameters

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="fused_experts_targets",
    kind=Kind.WARNING,
    symptom=(
        "LoRA on gate_proj, up_proj and down_proj, or on all-linear, of 26B-A4B trains none of the "
        "experts, without a warning"
    ),
    affects=("transformers", "peft"),
    unreported="A limit of the design; reported only in another project (unsloth #4907).",
)


@PATCH.probe
def layers_can_be_asked() -> Finding:
    """Check for the attribute that the warning reads, and for a warning by PEFT itself."""
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    if not hasattr(BaseTunerLayer, "adapter_layer_names"):
        return drifted("BaseTunerLayer has no adapter_layer_names")
    code = code_of(BaseTuner.inject_adapter)
    return fixed_if(mentions(code, "xperts"), "BaseTuner.inject_adapter handles experts itself")


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(
    original: Any, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, model, adapter_name, *args, **kwargs)
    model_type = getattr(getattr(model, "config", None), "model_type", None) or ""
    if model_type.startswith("gemma4") and not all(each.is_meta for each in model.parameters()):
        _warn(model, adapter_name)
    return result


def _warn(model: Any, adapter_name: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules, adapted, reached = {}, [], set()
    for name, module in model.named_modules():
        own = name.replace(".base_layer", "")
        modules[own] = module  # the last module of a name is the innermost, the base layer
        if isinstance(module, BaseTunerLayer) and _has(module, adapter_name):
            adapted.append(own)
            reached.add(f"{own}.{getattr(module, 'parameter_name', '')}")
    missed = [n for n in experts_without_adapter(modules, adapted) if n not in reached]
    if missed:
        targets, layers = target_parameters(missed)
        logger.warning(
            "the adapter %r is on the dense MLP, but on none of the experts of %d layers, because "
            "target_modules matches only modules, and the experts of a layer are parameters.  To "
            "train the experts, too, add target_parameters=%r to the adapter's config.",
            adapter_name, layers, targets,
        )  # fmt: skip


def _has(layer: Any, adapter_name: str) -> bool:
    return any(adapter_name in getattr(layer, held, ()) for held in layer.adapter_layer_names)
