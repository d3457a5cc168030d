"""A model keeps PEFT's layers after its last adapter is deleted.

``model.delete_adapter`` of transformers removes the weights of an adapter from PEFT's layers, and
leaves these layers in the model.  They compute the same as the layers that they wrap.  Without an
adapter, ``save_pretrained`` treats the model as an ordinary one and saves all of it, but it names a
weight in such a layer ``q_proj.base_layer.weight``.  ``from_pretrained`` looks for
``q_proj.weight``, and leaves it random.

The fix replaces PEFT's layers by the layers that they wrap when the last adapter is deleted.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions

PATCH = Patch(
    name="deleted_adapter_layers",
    symptom=(
        "delete_adapter of the last adapter, then save_pretrained: the file names weights "
        "q_proj.base_layer.weight, and loads as a model with random weights, without an error"
    ),
    affects=("transformers", "peft"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def layers_are_left() -> Finding:
    """Check whether the method restores the wrapped layers."""
    code = code_at("transformers.integrations.peft", "PeftAdapterMixin.delete_adapter")
    if "_hf_peft_config_loaded" not in code.co_names:
        return drifted("delete_adapter does not set _hf_peft_config_loaded")
    return fixed_if(mentions(code, "base_layer"), "delete_adapter restores the layers itself")


@PATCH.around("transformers.integrations.peft", "PeftAdapterMixin.delete_adapter")
def delete_adapter(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if not self._hf_peft_config_loaded:
        _unwrap(self)
    return result


def _unwrap(module: Any) -> None:
    """Replace PEFT's layers without adapters by the layers that they wrap.

    The others have adapters that another model, or PEFT itself, put there.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

    for name, child in module.named_children():
        if not isinstance(child, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            _unwrap(child)
        elif child._get_available_adapters():
            continue
        elif isinstance(child, BaseTunerLayer):
            module._modules[name] = child.get_base_layer()
        elif isinstance(child, TrainableTokensWrapper):
            module._modules[name] = child.token_adapter.get_base_layer()
        else:
            module._modules[name] = child.original_module
