"""Merging an adapter unties offloaded embeddings.

After a merge PEFT checks whether input and output embeddings are still one tensor.  It compares
their data pointers, and sets ``tie_word_embeddings=False`` in the model's config if they differ.
An offloaded weight is on meta and has no data pointer, so every merge marks a split model as
untied.  A saved checkpoint contains the weight once, and loads with a random head.

The fix compares the values if one of the two is offloaded.
"""

from __future__ import annotations

import warnings
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...model.hooks import offload_hook
from ...objects import shadowed

PATCH = Patch(
    name="offloaded_tie_check",
    symptom=(
        "merge_and_unload() with embed_tokens or lm_head offloaded, then save_pretrained: loaded "
        "again, lm_head.weight is newly initialized"
    ),
    affects=("transformers", "accelerate", "peft>=0.19"),
    unreported=("Found by the tests of this package; no report is known upstream."),
)


@PATCH.probe
def pointers_are_compared() -> Finding:
    """Check whether PEFT compares data pointers."""
    code = code_at("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
    return fixed_if(not mentions(code, "data_ptr"), "merging does not compare data pointers")


@PATCH.around("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
def unload_and_optionally_merge(
    original: Any, self: Any, merge: bool = True, *args: Any, **kwargs: Any
) -> Any:
    model = self.model
    if not (merge and _has_offloaded_end(model)):
        return original(self, merge, *args, **kwargs)
    # Without output embeddings, PEFT skips its own comparison.
    with shadowed(model, get_output_embeddings=lambda: None):
        result = original(self, merge, *args, **kwargs)
    if getattr(model.config, "tie_word_embeddings", False) and not _ends_are_equal(model):
        model.config.tie_word_embeddings = False
        warnings.warn(
            "Input and output embeddings are no longer tied after merging. Setting "
            "`tie_word_embeddings=False` in the model config.",
            stacklevel=3,
        )
    return result


def _ends(model: Any) -> list[Any]:
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return []
    return [] if None in ends else ends


def _has_offloaded_end(model: Any) -> bool:
    return any(offload_hook(module) is not None for end in _ends(model) for module in end.modules())


def _ends_are_equal(model: Any) -> bool:
    import torch

    one, other = (_weight(end) for end in _ends(model))
    return bool(torch.equal(one, other.to(one.device)))


def _weight(module: Any) -> Any:
    hook = offload_hook(module)
    return hook.weights_map["weight"] if module.weight.is_meta and hook else module.weight.detach()
