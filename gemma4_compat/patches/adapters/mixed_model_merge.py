"""``PeftMixedModel.merge_and_unload`` loses the adapters of offloaded layers.

PEFT's other models onload an offloaded weight before they merge an adapter into it, and store the
merged weight afterwards.  ``MixedModel`` has its own loop for layers with several nested adapters,
which does neither.  It adds the adapters to a weight on meta, which has no data.  The returned
model has no adapters on these layers.  No exception is raised.

The fix onloads the weight for each merge, and stores the result.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.hooks import offload_hook
from ...objects import shadowed
from .._code import code_at, mentions
from .._offload import onloaded
from ._adapter_layer import base_layer

PATCH = Patch(
    name="mixed_model_merge",
    symptom=(
        "PeftMixedModel.merge_and_unload on a split model: the adapters of offloaded layers are "
        "lost, without an error"
    ),
    affects=("transformers", "accelerate", "peft"),
    # Without it, the adapters of offloaded layers are on meta and have no values to merge.
    requires=("peft_redispatch",),
    changes=(
        "PeftMixedModel.merge_and_unload also merges the adapters of offloaded layers, including "
        "nested ones."
    ),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def weights_are_not_brought_in() -> Finding:
    """Check whether MixedModel onloads weights as PEFT's other models do."""
    code = code_at("peft.tuners.mixed.model", "MixedModel._unload_and_optionally_merge")
    return fixed_if(mentions(code, "onload_layer"), "MixedModel onloads offloaded weights itself")


@PATCH.around("peft.tuners.mixed.model", "MixedModel._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for layer in self.model.modules():
            base = base_layer(layer)
            if base is not layer and offload_hook(base) is not None and hasattr(layer, "merge"):
                stack.enter_context(shadowed(layer, merge=_merging(layer, base)))
        return original(self, *args, **kwargs)


def _merging(layer: Any, base: Any) -> Any:
    merge = layer.merge

    @wraps(merge)
    def merge_with_weights(*args: Any, **kwargs: Any) -> None:
        with onloaded(base, keep_changes=True):
            merge(*args, **kwargs)

    return merge_with_weights
