"""Builds a model on the meta device, from its ``config.json`` alone.

transformers' own quantizer decides which layers are quantized.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, failures_of
from ..files.checkpoint import CONFIG, Location, check_weights, config_file, located, read_config
from .parts import is_ours, is_shared_kv, shared_layers, tower_of

QUANTS = ("nf4", "int8", "bf16")
#: the ``quant_method`` of QAT checkpoints in Google's own format ("mobile")
QAT = "gemma"
#: the ``quant_method`` of checkpoints that become bfloat16 in the first forward
COMPRESSED = "compressed-tensors"


def meta_model(
    model_dir: Location,
    quantization_config: Any = None,
    device_map: Mapping[str, Any] | None = None,
) -> Any:
    """The model of a ``config.json`` on the meta device, in bfloat16; no weight is read.

    With a ``BitsAndBytesConfig``, its linear layers are replaced by those of bitsandbytes.
    transformers keeps some layers, among others those that ``device_map`` puts on "cpu" or "disk".
    With the config of a QAT checkpoint, the layers are those of this checkpoint.
    The quantization of the checkpoint itself does not matter.

    Raises:
        InputError: there is no such folder or repository, its ``config.json`` describes no model
            that the installed transformers knows, weights here are damaged or do not fit it, or it
            cannot be quantized.
    """
    import torch
    import transformers

    folder = located(model_dir)
    file, version = folder / CONFIG, f"transformers {transformers.__version__}"
    quantized = read_config(folder).get("quantization_config")  # refuses what is no model's config
    header = check_weights(folder)
    config_dir = config_file(folder).parent
    with failures_of(f"{file}: not understood by {version}"):
        config = transformers.AutoConfig.from_pretrained(config_dir, trust_remote_code=False)
    name = next(iter(config.architectures or ()), "class for it")
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise InputError(f"{file}: {version} has no {name}")
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    first = max(shared_layers(config).start, 0)
    alone = sorted({*types[first:]} - {*types[:first]})
    if alone and "Assistant" not in name:  # which reuses those of the model that it helps
        what = f"no earlier layer has keys and values that those of {' and '.join(alone)} can reuse"
        raise InputError(f"{file}: num_kv_shared_layers is too large: {what}. Download it again")
    with failures_of(f"{file}: {name} cannot be built from it"):
        model = on_meta(architecture, config)
    if header and not quantized and is_ours(model):
        _check_tensors(f"{folder}: its weights do not fit {CONFIG}", header, model)
    if quantization_config is not None:
        from transformers.quantizers import AutoHfQuantizer

        # As before any load: a patch of the quantizer applies after the import of all its modules.
        importlib.import_module("transformers.integrations.bitsandbytes")
        with failures_of(f"{file}: {version} cannot quantize it"):
            packed = quantization_config.quant_method != "bitsandbytes"
            quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=packed)
            # As in from_pretrained, where they are not tied yet: the quantizer leaves the module of
            # the last parameter unquantized.
            _untie(model)
            with torch.device("meta"):
                quantizer.preprocess_model(model, device_map=dict(device_map or {"": 0}))
            model.tie_weights()
    return model


def _check_tensors(refusal: str, header: Mapping[str, Any], model: Any) -> None:
    """Refuse weights whose language model lacks tensors, or has some of other shapes.

    Weights with names that the model lacks are not judged: transformers may rename them.
    """
    shared, ties = shared_layers(model.config), model.all_tied_weights_keys
    shapes = {n: each.shape for n, each in header.items() if not is_shared_kv(n, shared)}
    if {name for name in shapes if tower_of(name) == "language"} - model.state_dict().keys():
        return
    skipped = {ties.get(name) for name in shapes}
    for name, parameter in model.named_parameters():
        judged = tower_of(name) == "language" and name not in skipped
        found, needed = shapes.get(name, "missing"), tuple(parameter.shape)
        if judged and found != needed and not is_shared_kv(name, shared):
            what = f"{name} must be of shape {needed}, and is {found}"
            raise InputError(f"{refusal}: {what}. Download both again")


def on_meta(architecture: Any, config: Any) -> Any:
    """The unquantized model of this class and config on the meta device, in bfloat16."""
    import torch

    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return architecture._from_config(config, dtype=torch.bfloat16)


def _untie(model: Any) -> None:
    from torch import nn

    for name in model.all_tied_weights_keys:
        module, _, leaf = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(model.get_submodule(module), leaf, nn.Parameter(tied.detach().clone(), False))


def checkpoint_model(folder: Location) -> tuple[Any, str | None]:
    """The model of a checkpoint on meta, and its quantization method, or ``None``.

    With bitsandbytes, the model is built as if it were quantized now: the layers have the same
    classes, however the weights are stored.  So are the layers of `QAT`.  With other methods, they
    are those of the unquantized model.

    Raises:
        InputError: as in `meta_model`.
    """
    folder = located(folder)  # both reads at one commit
    quantization = read_config(folder).get("quantization_config")
    method = None if quantization is None else str(quantization.get("quant_method", "unknown"))
    if method not in ("bitsandbytes", QAT):
        return meta_model(folder), method
    from transformers.quantizers import AutoQuantizationConfig

    with failures_of(f"{folder / CONFIG}: its quantization_config is not understood"):
        config = AutoQuantizationConfig.from_dict(quantization)
    return meta_model(folder, config), method


def checkpointing() -> str:
    """The method that turns on gradient checkpointing; transformers 5.23 renamed it."""
    from transformers import PreTrainedModel

    new = "activation_checkpointing_enable"
    return new if hasattr(PreTrainedModel, new) else "gradient_checkpointing_enable"


def bnb_config(quant: str, *, offload: bool = False, nested: bool = True, **options: Any) -> Any:
    """The ``BitsAndBytesConfig`` of "nf4" or "int8", with these options; ``None`` for "bf16"."""
    if quant == "bf16":
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**{**bnb_options(quant, offload=offload, nested=nested), **options})


def bnb_options(quant: str, *, offload: bool, nested: bool = True) -> dict[str, Any]:
    """The arguments of a ``BitsAndBytesConfig``, as plain values.

    With ``nested``, the statistics of "nf4" are quantized too (double quantization).
    """
    options: dict[str, Any] = {"load_in_8bit": True}
    if quant == "nf4":
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    if offload:
        # Without it, transformers refuses a device map with both CPU and GPU.
        options["llm_int8_enable_fp32_cpu_offload"] = True
    return options
