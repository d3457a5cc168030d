"""Loads base and adapter, first without their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, MergeError, failures_of
from ..model.parts import is_shared_kv, shared_layers


def rehearse(base: Path, adapter: Path, dtype: str) -> None:
    """Load both on the meta device, to check names and shapes.

    Raises:
        InputError: base or adapter cannot be loaded, or the adapter does not fit.
    """
    import peft
    import transformers

    with failures_of(f"{base}: transformers {transformers.__version__} cannot load it"):
        model, loaded = _from_pretrained(base, dtype, "meta")
    shared = shared_layers(model.config)  # some releases have unused weights in these layers
    if missing := sorted(n for n in loaded["missing_keys"] if not is_shared_kv(n, shared)):
        raise InputError(
            f"{base}: its weights lack {len(missing)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}"
        )
    with failures_of(f"{adapter} does not fit {base}"):
        settings = peft.PeftConfig.from_pretrained(adapter)
        if hasattr(settings, "init_lora_weights"):
            settings.init_lora_weights = False  # some settings need the base model's values
        try:
            adapted(model, adapter, "cpu", config=settings)
        except RuntimeError as error:
            # Another one may come from the meta device alone; then loading the weights decides.
            if "size mismatch" in str(error):
                raise


def load_base(folder: Path, dtype: str, device: str) -> Any:
    """The whole model in eval mode.

    Raises:
        MergeError: it cannot be loaded.
    """
    with failures_of(f"loading {folder} failed", MergeError):
        return _from_pretrained(folder, dtype, device)[0]


def _from_pretrained(folder: Path, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """The model in eval mode, and transformers' loading info."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):  # check_base found no quantised weights
        del config.quantization_config
    name = (config.architectures or ["AutoModelForImageTextToText"])[0]
    architecture = getattr(transformers, name, transformers.AutoModelForImageTextToText)
    # No device map for the CPU: PEFT would treat the model as offloaded.
    placed = {} if device == "cpu" else {"device_map": {"": device}}
    model, loaded = architecture.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        **placed,
    )
    return model.eval(), loaded


def adapted(model: Any, adapter: Path, device: str, **options: Any) -> Any:
    """The model with the adapter loaded, in eval mode."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapter, torch_device=device, **options).eval()
    loaded = model.load_adapter(adapter, "default", torch_device=device)  # for its result
    if loaded.unexpected_keys:
        raise ValueError(
            f"the model has no place for {len(loaded.unexpected_keys)} tensors, such as "
            f"{loaded.unexpected_keys[0]}"
        )
    return model


def untie(model: Any) -> None:
    """Set ``tie_word_embeddings`` to False if the adapter has untied the embeddings."""
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False
