"""The text model alone leaves out the weights of a multimodal checkpoint.

A multimodal checkpoint names the text model's weights ``model.language_model.layers.0...``.
``Gemma4ForCausalLM`` names the same weights ``model.layers.0...``.  transformers translates such
names with a table of conversions, by model type.  Gemma 3n's text model is in it, Gemma 4's is not.
``Gemma4ForCausalLM.from_pretrained`` then takes no weight of the checkpoint at all.  The model
comes out with random weights, and the only sign is a table of missing keys in the log.

The fix gives the missing renaming to the load.  It is not kept for saving: ``save_pretrained``
writes the text model's own names, which load without this patch too.

A quantised multimodal checkpoint has its ``quantization_config`` outside of ``text_config``, and
``Gemma4ForCausalLM`` reads the latter alone.  That is refused, with what to pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._text_model import is_text_model, tensor_names, with_renaming

PATCH = Patch(
    name="text_model_weights",
    symptom=(
        "Gemma4ForCausalLM.from_pretrained of a multimodal checkpoint has random weights: "
        "all of the model's weights are MISSING in the load report, and nothing is raised"
    ),
    affects=("transformers",),
    changes=(
        "Gemma 4's text model loads the weights that a multimodal checkpoint names "
        "model.language_model.*.  A checkpoint that holds weights under both names is refused, and "
        "a quantised one whose quantization_config the text model does not get."
    ),
    links=("https://github.com/huggingface/transformers/pull/45953",),
)

_INSIDE = r"^(?:model\.)?language_model\."
#: what bitsandbytes saves beside a weight of 4 and of 8 bit
_OF_QUANTISED = (".weight.absmax", ".SCB")


@PATCH.probe
def text_model_has_no_renaming() -> Finding:
    """Look for the model in the tables; asking for its conversions would fill a cache."""
    import inspect

    from transformers import conversion_mapping as tables

    build = getattr(tables, "_build_checkpoint_conversion_mapping", None)
    if build is None:
        return drifted("transformers has no _build_checkpoint_conversion_mapping")
    filled = tables._checkpoint_conversion_mapping_cache or ()
    names = {*tables._MODEL_TO_CONVERSION_PATTERN, *filled}
    for const in inspect.unwrap(build).__code__.co_consts:
        names.update(const if isinstance(const, tuple) else (const,))
    if found := {"gemma4_text", "Gemma4ForCausalLM"} & names:
        return fixed(f"transformers has weight conversions for {min(found)}")
    return broken()


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._load_pretrained_model")
def load_pretrained_model(original: Any) -> Any:
    @wraps(original)
    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # With expected_keys it is an adapter that is loaded.
        if not is_text_model(model) or args or kwargs:
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        from transformers.core_model_loading import WeightRenaming

        own = "model." if hasattr(model, "model") else ""
        names = set(tensor_names(state_dict, checkpoint_files))
        _refuse_both(own, names)
        _refuse_unknown_quantisation(load_config.hf_quantizer, names)
        renaming = WeightRenaming(_INSIDE, own)
        load_config = with_renaming(load_config, renaming)
        result = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        # What is kept there is undone on saving.
        kept = vars(model).get("_weight_conversions")
        if kept is not None:
            model._weight_conversions = [each for each in kept if each is not renaming]
        return result

    return _load_pretrained_model


def _refuse_both(own: str, names: Collection[str]) -> None:
    """Refuse a checkpoint in which two tensors are for the same weight."""
    inside = (name.partition("model.language_model.") for name in names)
    both = sorted(f"{own}{rest}" for start, _, rest in inside if rest and not start)
    both = [name for name in both if name in names]
    if both:
        raise ValueError(
            f"the checkpoint has {len(both)} weights of the text model under two names, such as "
            f"{both[0]} and model.language_model.{both[0].removeprefix(own)}: it is unclear which "
            "to load.  Remove those under one of the names from the checkpoint"
        )


def _refuse_unknown_quantisation(quantizer: Any, names: Iterable[str]) -> None:
    """Refuse quantised weights that would be loaded as if they were not."""
    if getattr(quantizer, "pre_quantized", False):
        return
    quantised = [n for n in names if "language_model." in n and n.endswith(_OF_QUANTISED)]
    if quantised:
        raise ValueError(
            "the checkpoint is quantised by bitsandbytes, and the text model's config does not "
            "say so: config.json has quantization_config outside of text_config.  Pass the config "
            "of both:\n"
            "    whole = AutoConfig.from_pretrained(MODEL)\n"
            "    config = whole.text_config\n"
            "    config.quantization_config = whole.quantization_config\n"
            "    model = Gemma4ForCausalLM.from_pretrained(MODEL, config=config)"
        )
