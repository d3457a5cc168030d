"""An adapter of the text model does not load into the multimodal model, or the other way round.

``model.layers.0`` of ``Gemma4ForCausalLM`` is ``model.language_model.layers.0`` of
``Gemma4ForConditionalGeneration``.  The module names in ``target_modules`` (``q_proj``) match both
models, so PEFT adds adapters to the layers.  The tensor names in the file are full paths, which
match only one of the models, so no tensor is loaded.  The adapters keep their initial values.  PEFT
warns about missing keys, transformers logs them, and neither raises an error.

The fix converts the tensor names to those of the model.  The text model has no modules for the
vision and audio tensors of a multimodal adapter; a warning says so.  An adapter that would load
only in part, or with another rank or scale, is refused with an error, and removed from the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import mentions
from ...errors import RefusedError
from ...model.device_maps import above
from ...model.parts import base_of
from ...objects import shadowed
from .._text_model import (
    PEFT,
    is_gemma4,
    name_there,
    other_names,
    renaming,
    tensor_shapes,
    with_renaming,
)
from ._native_names import LOAD_ADAPTER, loading_in

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="text_model_adapter",
    symptom=(
        "an adapter of Gemma4ForCausalLM loaded into Gemma4ForConditionalGeneration, or the other "
        "way round, has no effect: 'Found missing adapter keys', and no tensor is loaded"
    ),
    affects=("transformers", "peft"),
    unreported="Reported only in another project (vllm #38844).",
)


@PATCH.probe
def names_are_taken_as_they_are() -> Finding:
    """Search PEFT's code for the name of the part, which any conversion would need."""
    from peft.utils import save_and_load

    code = save_and_load.__spec__.loader.get_code(save_and_load.__name__)
    return fixed_if(mentions(code, "language_model"), "PEFT converts the names itself")


@PATCH.around("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(
    original: Any,
    model: Any,
    peft_model_state_dict: Any,
    adapter_name: str = "default",
    *args: Any,
    **kwargs: Any,
) -> Any:
    from transformers import PreTrainedModel

    base = base_of(model)  # a PeftMixedModel stays as it is
    is_one = isinstance(base, PreTrainedModel) and is_gemma4(base)
    names = other_names(base, peft_model_state_dict) if is_one else {}
    if not names:
        return original(model, peft_model_state_dict, adapter_name, *args, **kwargs)
    _refuse_other_values(base, model.peft_config[adapter_name])
    state = {names.get(name, name): value for name, value in peft_model_state_dict.items()}
    before = _values(model, adapter_name)
    result = original(model, state, adapter_name, *args, **kwargs)
    try:
        _tell_left_out(base, result.unexpected_keys)
    except RefusedError:
        for parameter, value in before:
            parameter.data.copy_(value)
        raise
    return result


@PATCH.around("peft.peft_model", "PeftModel.load_adapter")
def peft_load_adapter(
    original: Any, self: Any, model_id: Any, adapter_name: Any, *args: Any, **kwargs: Any
) -> Any:
    with _removed_if_refused(self, adapter_name):
        return original(self, model_id, adapter_name, *args, **kwargs)


@PATCH.around(*LOAD_ADAPTER)
@loading_in
@contextmanager
def load_adapter(model: Any, adapter_name: str) -> Iterator[None]:
    if not is_gemma4(model):
        yield
        return
    load = model._load_pretrained_model

    @wraps(load)
    def load_pretrained_model(
        *args: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
    ) -> Any:
        from transformers.core_model_loading import WeightRenaming

        kwargs |= {"state_dict": state_dict, "checkpoint_files": checkpoint_files}
        if not other_names(model, tensor_shapes(state_dict, checkpoint_files)):
            return load(*args, load_config=load_config, **kwargs)
        _refuse_other_values(model, model.peft_config[adapter_name])
        # transformers has removed "base_model.model." before it applies this.
        config = with_renaming(load_config, WeightRenaming(*renaming(model)))
        result = load(*args, load_config=config, **kwargs)
        _tell_left_out(model, result[0].unexpected_keys)
        return result

    with (
        _removed_if_refused(model, adapter_name),
        shadowed(model, _load_pretrained_model=load_pretrained_model),
    ):
        yield


def _refuse_other_values(base: Any, config: Any) -> None:
    """Refuse a config that gives a layer another rank or alpha under its name in this model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import get_pattern_key

    layers = [name for name, each in base.named_modules() if isinstance(each, BaseTunerLayer)]
    for pattern in ("rank_pattern", "alpha_pattern"):
        values: Mapping[str, Any] = getattr(config, pattern, None) or {}
        for name in layers:
            here, there = (
                values.get(get_pattern_key(list(values), each))
                for each in (name, name_there(base, name))
            )
            if here != there:
                raise RefusedError(
                    f"the adapter was made for another class than {type(base).__name__}, and its "
                    f"{pattern} names layers as that class does, so {name} would get {here} "
                    f"instead of {there}.  Load the adapter into the class that it was made for, "
                    f"or rename the layers in {pattern} of its adapter_config.json"
                )


@contextmanager
def _removed_if_refused(model: Any, adapter_name: str) -> Iterator[None]:
    """Remove a new adapter, and its layers, if the block refuses it."""
    is_new = adapter_name not in getattr(model, "peft_config", {})
    before = dict(model.named_modules()) if is_new else {}
    try:
        yield
    except RefusedError:
        if is_new:
            model.delete_adapter(adapter_name)
            for name, module in before.items():
                if model.get_submodule(name) is not module:
                    parent, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(parent), leaf, module)
        raise


def _values(model: Any, adapter_name: str) -> list[tuple[Any, Any]]:
    """The parameters of an adapter, and copies of their values."""
    return [
        (parameter, parameter.detach().clone())
        for name, parameter in model.named_parameters()
        if adapter_name in name.split(".") and not parameter.is_meta
    ]


def _tell_left_out(base: Any, unexpected: Iterable[str]) -> None:
    """Warn about tensors for modules that this model lacks; refuse other unloaded tensors.

    Raises:
        RefusedError: the model has the layer of an unloaded tensor.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    modules = dict(base.named_modules())
    absent = []
    for name in sorted(unexpected):
        outwards = above(name.removeprefix(PEFT))
        found = [each for each in outwards if each and each in modules][::-1]
        if not found:  # a tensor that all layers share
            continue
        # The layer has no children, or other adapters.
        adapted = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        layer = next((each for each in found if isinstance(modules[each], adapted)), found[-1])
        if isinstance(modules[layer], adapted) or not modules[layer]._modules:
            raise RefusedError(
                f"the adapter was made for another class than {type(base).__name__}: its "
                f"target_modules do not match {layer}, for which its file has tensors.  Load the "
                "adapter into the class that it was made for, or change target_modules in its "
                "adapter_config.json"
            )
        absent.append(name)
    if absent:
        logger.warning(
            "%d tensors of the adapter are for modules that %s does not have, such as %s.  They "
            "are left out; all other tensors are loaded.",
            len(absent), type(base).__name__, absent[0],
        )  # fmt: skip
