"""Loads base and adapter, first without their weights, merges them, and writes the merged model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from ..errors import InputError, MergeError, failures_of
from ..files.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_weights, is_in
from ..inspection.adapter import inspect_adapter
from ..model.parts import is_shared_kv, shared_layers
from ..results.text import plural
from . import parity
from .prompts import all_inputs
from .result import Parity

#: a model's prompts, and its logits for them
Outputs = list[tuple[dict[str, Tensor], Tensor]]
_LIMIT = 0.5  # the largest tolerance: a larger difference means another model
_MARGIN = 2  # the tolerance, as a multiple of the change by one more rounding


def rehearse(base: Path, adapter: Path) -> None:
    """Load both on the meta device, to check names and shapes.

    Raises:
        InputError: base or adapter cannot be loaded, or the adapter does not fit or lacks tensors.
    """
    with failures_of(f"{base}: transformers {transformers.__version__} cannot load it"):
        model, loaded = _from_pretrained(base, "meta")
    if missing := _used(loaded["missing_keys"], model):
        raise InputError(
            f"{base}: its weights lack {len(missing)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}"
        )
    with failures_of(f"{adapter} does not fit {base}"):
        found = inspect_adapter(adapter, model).groups if is_in(adapter, ADAPTER_WEIGHTS) else ()
        for group in (each for each in found if each.kind == "missing"):
            raise InputError(
                f"{adapter}: lacks {plural(group.count, 'tensor')} that its {ADAPTER_CONFIG} asks "
                f"for, such as {group.example}: PEFT would begin with new ones, which are not "
                f"trained. Use the complete file, and the {ADAPTER_CONFIG} of the training"
            )
        settings = peft.PeftConfig.from_pretrained(adapter)
        if hasattr(settings, "init_lora_weights"):
            settings.init_lora_weights = False  # some settings need the base model's values
        try:
            _adapted(model, adapter, "cpu", config=settings)
        except RuntimeError as error:
            # Another one may come from the meta device alone; then loading the weights decides.
            if "size mismatch" in str(error):
                raise


def merged_in_memory(
    base: Path,
    adapter: Path,
    tokens: Mapping[str, Tensor],
    device: str,
    progress: Callable[[str], None],
) -> tuple[Any, Outputs, list[Parity], list[str]]:
    """Load base and adapter, merge, and compare.

    Returns the merged model, its outputs, the comparison, and notes for the user.

    Raises:
        MergeError: base or adapter cannot be loaded, merging failed, or the logits with the
            adapter are not finite.
    """
    progress(f"loading {base} in bfloat16")
    model = _load_base(base, device)
    inputs, notes = all_inputs(model, tokens)
    progress(f"loading {adapter}")
    with failures_of(f"loading {adapter} on {base} failed", MergeError):
        model = _adapted(model, adapter, device)

    expected, rounding = {}, 0.0
    for name in _each(inputs, "outputs with the adapter", progress):
        with failures_of(f"computing outputs for {name!r} failed", MergeError):
            prompt = inputs[name] = parity.continued(model, inputs[name])
            logits = parity.logits(model, prompt)
            with model.disable_adapter():
                effect = parity.worst(parity.logits(model, prompt), logits)
            with parity.rounded_once_more(model):
                change = parity.worst(parity.logits(model, prompt), logits)
        if not logits.isfinite().all():
            raise MergeError(f"with the adapter loaded, the logits for {name!r} are not finite")
        expected[name] = logits, effect
        rounding = max(rounding, change)
    progress("merging")
    with failures_of("merging failed", MergeError):
        model = model.merge_and_unload()
        _untie(model)

    tolerance = min(_MARGIN * rounding, _LIMIT)
    rows, outputs = [], []
    for name in _each(inputs, "outputs merged", progress):
        logits = parity.logits(model, inputs[name])
        outputs.append((inputs[name], logits))
        rows.append(parity.compare(name, logits, *expected.pop(name), tolerance))
    effects = [row.effect for row in rows]
    if not any(effects):
        notes.append("the adapter changes nothing: the outputs are those of the base model")
    elif max(effects) <= tolerance:
        notes.append("the adapter changes these outputs by less than the tolerance for rounding")
    return model, outputs, rows, notes


def _each(names: Mapping[str, Any], step: str, progress: Callable[[str], None]) -> Iterator[str]:
    for number, name in enumerate(list(names), start=1):
        progress(f"{step} {number}/{len(names)}: {name[:40]!r}")
        yield name


def write(model: Any, base: Path, folder: Path) -> None:
    """Write the merged model.

    The base's weights for keys and values of layers that share them are written, too: no release
    of transformers uses them, and vLLM before September 2026 refuses a checkpoint without them.

    Raises:
        MergeError: writing failed.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    shard = max(size // 8, 2**26)  # writing a shard copies it in memory
    with failures_of(f"writing to {folder.parent} failed", MergeError):
        state = model.state_dict()
        state |= _unused(base, state, model)
        model.save_pretrained(folder, state_dict=state, max_shard_size=shard)


def read_back(folder: Path, outputs: Outputs, device: str) -> None:
    """Load the written model, after the merged one is deleted, and compare their logits.

    Raises:
        MergeError: the logits differ.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    written = _load_base(folder, device)
    for prompt, logits in outputs:
        if not torch.equal(parity.logits(written, prompt), logits):
            raise MergeError("the written checkpoint does not give the merged model's logits")


def _unused(base: Path, state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The weights in the base's files that layers with shared keys and values do not have."""
    shared, found = shared_layers(model.config), {}
    for name, entry in check_weights(base).items():
        if name not in state and is_shared_kv(name, shared):
            with safe_open(entry.file, "pt") as file:
                found[name] = file.get_tensor(name).to(model.dtype)
    return found


def _used(names: Iterable[str], model: Any) -> list[str]:
    """The names without those of weights that only some releases have, and none uses."""
    shared = shared_layers(model.config)
    return sorted(name for name in names if not is_shared_kv(name, shared))


def _load_base(folder: Path, device: str) -> Any:
    """The whole model in eval mode."""
    with failures_of(f"loading {folder} failed", MergeError):
        return _from_pretrained(folder, device)[0]


def _from_pretrained(folder: Path, device: str) -> tuple[Any, dict[str, Any]]:
    """The model in eval mode, and transformers' loading info."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):  # check_base found no quantized weights
        del config.quantization_config
    name = (config.architectures or ["AutoModelForImageTextToText"])[0]
    architecture = getattr(transformers, name, transformers.AutoModelForImageTextToText)
    # No device map for the CPU: PEFT would treat the model as offloaded.
    placed = {} if device == "cpu" else {"device_map": {"": device}}
    model, loaded = architecture.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, output_loading_info=True, **placed
    )
    return model.eval(), loaded


def _adapted(model: Any, adapter: Path, device: str, **options: Any) -> Any:
    """The model with the adapter loaded, in eval mode."""
    model = peft.PeftModel.from_pretrained(model, adapter, torch_device=device, **options).eval()
    loaded = model.load_adapter(adapter, "default", torch_device=device)  # for its result
    if unexpected := _used(loaded.unexpected_keys, model):
        raise ValueError(
            f"the model has no place for {len(unexpected)} tensors, such as {unexpected[0]}"
        )
    return model


def _untie(model: Any) -> None:
    """Set ``tie_word_embeddings`` to False if the adapter has untied the embeddings."""
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
