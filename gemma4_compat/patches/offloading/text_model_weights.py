"""The text model alone does not load the weights of a multimodal checkpoint.

A multimodal checkpoint names the text model's weights ``model.language_model.layers.0...``.
``Gemma4ForCausalLM`` names the same weights ``model.layers.0...``.  transformers translates such
names with a table of conversions, by model type.  The table has Gemma 3n's text model, but not
Gemma 4's.  ``Gemma4ForCausalLM.from_pretrained`` then loads no weight of the checkpoint.  The model
has random weights, and the only sign is a table of missing keys in the log.

The multimodal model does not load the weights of a text model's checkpoint either.

The fix adds the missing renaming to the load.  It does not keep it for saving: ``save_pretrained``
writes the text model's own names, which also load without this patch.

A quantized multimodal checkpoint has its ``quantization_config`` outside ``text_config``, and
``Gemma4ForCausalLM`` reads only ``text_config``.  In this case the fix raises an error that says
which config to pass.  The multimodal class loads a text model's checkpoint with its own default
config, unless the caller passes one; if the text model has other sizes, the fix raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...engine.probing import code_of
from ...errors import RefusedError
from .._text_model import (
    is_gemma4,
    is_text_model,
    other_names,
    renaming,
    tensor_shapes,
    with_renaming,
)

PATCH = Patch(
    name="text_model_weights",
    symptom=(
        "Gemma4ForCausalLM.from_pretrained of a multimodal checkpoint has random weights, as has "
        "Gemma4ForConditionalGeneration.from_pretrained of a text model's checkpoint: "
        "all of the model's weights are MISSING in the load report, and nothing is raised"
    ),
    affects=("transformers",),
    links=("https://github.com/huggingface/transformers/pull/45953",),
)

#: The endings of tensors that bitsandbytes saves with each 4-bit and each 8-bit weight.
_OF_QUANTIZED = (".weight.absmax", ".SCB")


@PATCH.probe
def text_model_has_no_renaming() -> Finding:
    """Look for the model in the tables.  The public function would fill a cache."""
    from transformers import conversion_mapping as tables

    filled = tables._checkpoint_conversion_mapping_cache or ()
    names = {*tables._MODEL_TO_CONVERSION_PATTERN, *filled}
    for const in code_of(tables._build_checkpoint_conversion_mapping).co_consts:
        names.update(const if isinstance(const, tuple) else (const,))
    if known := {"gemma4_text", "Gemma4ForCausalLM"} & names:
        return fixed(f"transformers has weight conversions for {min(known)}")
    return broken()


@PATCH.around("transformers.modeling_utils", "PreTrainedModel._load_pretrained_model")
def load_pretrained_model(
    original: Any,
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # expected_keys is passed only if an adapter is loaded.
    is_text = is_text_model(model)
    if args or kwargs or not (is_text or is_gemma4(model)):
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    from transformers.core_model_loading import WeightRenaming

    shapes = tensor_shapes(state_dict, checkpoint_files)
    is_own = not is_text and any("language_model." in name for name in shapes)
    others = {} if is_own else other_names(model, shapes)
    if is_text:
        _refuse_unknown_quantization(load_config.hf_quantizer, others)
    elif others:
        _refuse_other_sizes(model, others, shapes)
    else:
        return original(model, state_dict, checkpoint_files, load_config)
    rule = WeightRenaming(*renaming(model))
    result = original(model, state_dict, checkpoint_files, with_renaming(load_config, rule))
    # ``save_pretrained`` would reverse every conversion that stays in this list.
    kept = vars(model).get("_weight_conversions")
    if kept is not None:
        model._weight_conversions = [each for each in kept if each is not rule]
    return result


def _refuse_other_sizes(model: Any, names: Iterable[str], shapes: dict[str, Any]) -> None:
    """Raise ``RefusedError`` if the model's text part is not the text model of the checkpoint."""
    config = model.config.get_text_config()
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    embedding = model.get_input_embeddings().weight.shape
    found = shapes.get("model.embed_tokens.weight")
    if len(layers) != config.num_hidden_layers or found not in (None, tuple(embedding)):
        raise RefusedError(
            f"the checkpoint is a text model's, and {type(model).__name__} got a config with a "
            f"text model of another size: {config.num_hidden_layers} layers, {list(embedding)} "
            f"embeddings; the checkpoint has {len(layers)} layers, {found and list(found)}.  Load "
            "it with Gemma4ForCausalLM or AutoModelForCausalLM.  To load its weights into a "
            "multimodal model with new towers, pass a config that contains its text_config"
        )


def _refuse_unknown_quantization(quantizer: Any, names: Iterable[str]) -> None:
    """Raise ``RefusedError`` if quantized weights would be loaded as unquantized ones."""
    if getattr(quantizer, "pre_quantized", False):
        return
    if any(name.endswith(_OF_QUANTIZED) for name in names):
        raise RefusedError(
            "the checkpoint is quantized by bitsandbytes, but the text model's config has no "
            "quantization_config: config.json has it outside text_config.  Add it to the text "
            "model's config:\n"
            "    whole = AutoConfig.from_pretrained(MODEL)\n"
            "    config = whole.text_config\n"
            "    config.quantization_config = whole.quantization_config\n"
            "    model = Gemma4ForCausalLM.from_pretrained(MODEL, config=config)"
        )
