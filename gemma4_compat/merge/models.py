"""Loads base and adapter, first without their weights."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, MergeError, reason
from ..model.files import ADAPTER_CONFIG, CONFIG
from .needs import Needs, needs_of


@contextlib.contextmanager
def failures_of(step: str) -> Iterator[None]:
    """Turn the exceptions of this step into ``MergeError``, with a message of one line."""
    try:
        yield
    except MergeError:
        raise
    except Exception as error:
        raise MergeError(f"{step} failed: {reason(error)}") from error


def rehearse(base: Path, adapter: Path, dtype: str) -> tuple[Any, Needs]:
    """Load both on the meta device, to check names and shapes.

    Returns the base's config, and what the merge needs.

    Raises:
        InputError: base or adapter cannot be loaded, or the adapter does not fit.
    """
    import peft
    import transformers

    libraries = f"transformers {transformers.__version__}", f"peft {peft.__version__}"
    try:
        config = transformers.AutoConfig.from_pretrained(base)
    except Exception as error:  # a config can be wrong in many ways
        file = base / CONFIG
        raise InputError(f"{file}: not understood by {libraries[0]}: {reason(error)}") from error
    try:
        model, loaded = _from_pretrained(base, dtype, "meta")
    except Exception as error:
        raise InputError(f"{base}: {libraries[0]} cannot load it: {reason(error)}") from error
    if missing := sorted(name for name in loaded["missing_keys"] if not _is_unused(name, config)):
        raise InputError(
            f"{base}: its weights lack {len(missing)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}"
        )
    try:
        settings = peft.PeftConfig.from_pretrained(adapter)
    except Exception as error:
        file = adapter / ADAPTER_CONFIG
        raise InputError(f"{file}: not understood by {libraries[1]}: {reason(error)}") from error
    if hasattr(settings, "init_lora_weights"):
        settings.init_lora_weights = False  # some settings need the base model's values
    weights = size_in_bytes(model)
    try:
        _adapted(model, adapter, "cpu", config=settings)
    except Exception as error:
        if not _is_of_the_meta_device(error):
            raise InputError(f"{adapter} does not fit {base}: {reason(error)}") from error
    return config, needs_of(base, model, weights, dtype)


def _is_of_the_meta_device(error: Exception) -> bool:
    """Whether the error may come only from the meta device; then loading the weights decides."""
    text = str(error)
    return "meta" in text or (isinstance(error, RuntimeError) and "size mismatch" not in text)


def _is_unused(name: str, config: Any) -> bool:
    """Whether it is a key or value tensor of a KV-shared layer, which does not use it.

    Some transformers releases have such weights; later ones do not save them.
    """
    text = config.get_text_config()
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    layer = re.search(r"\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    return layer is not None and "_tower." not in name and int(layer[1]) >= own


def load_base(folder: Path, dtype: str, device: str) -> Any:
    """The whole model in eval mode.

    Raises:
        MergeError: it cannot be loaded.
    """
    with failures_of(f"loading {folder}"):
        return _from_pretrained(folder, dtype, device)[0]


def load_adapter(model: Any, base: Path, adapter: Path, device: str) -> Any:
    """The model with the adapter loaded.

    Raises:
        MergeError: it cannot be loaded.
    """
    with failures_of(f"loading {adapter} on {base}"):
        return _adapted(model, adapter, device)


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


def _adapted(model: Any, adapter: Path, device: str, **options: Any) -> Any:
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


def size_in_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
