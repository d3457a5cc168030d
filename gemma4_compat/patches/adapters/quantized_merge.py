"""Merging into a quantized base changes the model's outputs, and PEFT's warning hardly shows it.

PEFT merges into a 4-bit or 8-bit weight by dequantizing it, adding the adapter's update and
quantizing the sum again.  An adapter's update is small compared with the steps between the values
that four bits can store, so much of it is lost in rounding, and the new scales round the base
weight once more.  The merged model gives neither the outputs of the adapter nor those of the base.
PEFT mentions "rounding errors" through ``warnings``, once per process or once per layer.

The arithmetic cannot be fixed, because the quantized format cannot store the merged weight.  This
patch warns once per model, before the first merge, and names a way that keeps the outputs.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_of, mentions

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="quantized_merge",
    kind=Kind.WARNING,
    symptom=(
        "merge_and_unload() or merge_adapter() on a 4-bit or 8-bit base gives another model than "
        "the one with the adapter loaded"
    ),
    affects=("transformers", "peft", "bitsandbytes"),
    note="It is inherent in quantized weights; no upstream change can fix it.",
    links=("https://github.com/huggingface/peft/issues/2321",),
)

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


@PATCH.probe
def merging_is_in_base_tuner() -> Finding:
    """Check for a warning by PEFT itself."""
    from peft.tuners.tuners_utils import BaseTuner

    handled = mentions(code_of(BaseTuner._check_merge_allowed), "quanti")
    return fixed_if(handled, "BaseTuner._check_merge_allowed handles quantized weights itself")


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner._check_merge_allowed")
def check_merge_allowed(original: Any, self: Any) -> Any:
    """PEFT calls this method before every merge, and nowhere else."""
    allowed = original(self)
    _warn(self.model)
    return allowed


def _warn(model: Any) -> None:
    if model in _warned:
        return
    quantized = _quantized_layers(model)
    if not quantized:
        return
    _warned.add(model)
    logger.warning(
        "an adapter is being merged into %d quantized layers (bitsandbytes, %s).  The sum is "
        "quantized again, which rounds much of the adapter away, so the merged model does not give "
        "the outputs of the model with the adapter loaded (on a small model, its logits were off "
        "by 27%% in 4 bit and 5%% in 8 bit, against 2%% without quantization).  To keep the "
        "outputs, merge into the unquantized checkpoint: run gemma4-compat merge BASE ADAPTER OUT, "
        "or call gemma4_compat.merge.",
        len(quantized), " and ".join(sorted(set(quantized))),
    )  # fmt: skip


def _quantized_layers(model: Any) -> list[str]:
    """ "4 bit" or "8 bit" for each layer with an adapter on a bitsandbytes weight."""
    kinds = {"Params4bit": "4 bit", "Int8Params": "8 bit"}
    layers = (m for m in model.modules() if hasattr(m, "get_base_layer"))
    # The wrapper of a parameter, such as the experts of a layer, names it.
    weights = (
        getattr(m.get_base_layer(), getattr(m, "parameter_name", "weight"), None) for m in layers
    )
    classes = (type(weight).__name__ for weight in weights)
    return [kinds[name] for name in classes if name in kinds]
