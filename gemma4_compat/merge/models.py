"""Loading base and adapter, first without their weights."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, MergeError, reason
from ..model.files import ADAPTER_CONFIG, CONFIG


@contextlib.contextmanager
def failures_of(step: str) -> Iterator[None]:
    """What a library raises in this step is said as ``MergeError``, in one line."""
    try:
        yield
    except MergeError:
        raise
    except Exception as error:
        raise MergeError(f"{step} failed: {reason(error)}") from error


def rehearse(base: Path, adapter: Path, dtype: str) -> Any:
    """Load both on the meta device, where weights have shapes and no values; returns the config.

    Raises:
        InputError: base or adapter cannot be loaded, or they do not fit.
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
        settings.init_lora_weights = False  # some kinds compute with the base model's values
    try:
        _adapted(model, adapter, "cpu", config=settings)
    except Exception as error:
        if not _is_of_the_meta_device(error):
            raise InputError(f"{adapter} does not fit {base}: {reason(error)}") from error
    return config


def _is_of_the_meta_device(error: Exception) -> bool:
    """Whether it may be that loading fails without values alone; then the real loading decides."""
    text = str(error)
    return "meta" in text or (isinstance(error, RuntimeError) and "size mismatch" not in text)


def _is_unused(name: str, config: Any) -> bool:
    """Whether it is of a layer's own keys and values, where the layer uses those of another one.

    Some releases of transformers have such weights, and later ones do not save them.
    """
    text = config.get_text_config()
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    found = re.search(r"\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    return found is not None and "_tower." not in name and int(found[1]) >= own


def load_base(folder: Path, dtype: str, device: str) -> Any:
    """The whole model in eval mode.

    Raises:
        MergeError: it cannot be loaded.
    """
    with failures_of(f"loading {folder}"):
        return _from_pretrained(folder, dtype, device)[0]


def load_adapter(model: Any, base: Path, adapter: Path, device: str) -> Any:
    """The model with the adapter on it.

    Raises:
        MergeError: it cannot be loaded.
    """
    with failures_of(f"loading {adapter} on {base}"):
        return _adapted(model, adapter, device)


def _from_pretrained(folder: Path, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """The model in eval mode, and what transformers says of its weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):  # the weights are not quantised: they were checked
        del config.quantization_config
    name = (config.architectures or ["AutoModelForImageTextToText"])[0]
    architecture = getattr(transformers, name, transformers.AutoModelForImageTextToText)
    # For the CPU no map: PEFT takes one as a sign that something is offloaded.
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
    loaded = model.load_adapter(adapter, "default", torch_device=device)  # says what fitted
    if loaded.unexpected_keys:
        raise ValueError(
            f"it has no place for {len(loaded.unexpected_keys)} tensors, such as "
            f"{loaded.unexpected_keys[0]}"
        )
    return model


def untie(model: Any) -> None:
    """Have the config say so where an adapter has untied the embeddings."""
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False


def size_in_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
