"""A device map may name modules that the model does not have.

``from_pretrained`` matches the keys of an explicit ``device_map`` against the names of the
parameters and never asks whether a key matched anything.  ``model.multi_modal_projector``, which
earlier models have and Gemma 4 has not (it has ``model.embed_vision``), places nothing; what it
was meant for goes where the rest of the map says or, if nothing else covers it, to the CPU.
accelerate's ``dispatch_model`` does check, but it is called after loading only, and not at all for
a map with a single device.

The fix says so before any weight is read, with the closest names that the model does have.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import wraps
from typing import Any

from ..engine import Finding, Patch, broken, drifted, fixed

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="device_map_keys",
    symptom=(
        "a device_map entry such as model.multi_modal_projector, which Gemma 4 does not have, is "
        "ignored: without a word, or with accelerate's 'The following device_map keys do not "
        "match any submodules in the model' after loading"
    ),
    affects=(("transformers>=5.5",),),
    changes=(
        "from_pretrained of a Gemma 4 or Gemma 3n model warns, once a load, about entries of an "
        "explicit device_map that name no module, parameter or buffer, and names the closest "
        "modules.  The map is used as it is."
    ),
    ends="not fixed upstream as of transformers 5.23.0",
)

_MODELS = ("gemma4", "gemma3n")
#: What earlier Gemma, LLaVA and other multimodal models call the parts of this one.
_FORMERLY = {
    "multi_modal_projector": "embed_vision",
    "mm_projector": "embed_vision",
    "vision_model": "vision_tower",
    "vision_encoder": "vision_tower",
    "visual": "vision_tower",
    "audio_projector": "embed_audio",
    "audio_model": "audio_tower",
    "audio_encoder": "audio_tower",
    "text_model": "language_model",
}


@PATCH.probe
def unknown_keys_pass() -> Finding:
    """Hand in a map with a key that no model has."""
    import inspect

    from torch.nn import Module
    from transformers.integrations.accelerate import _get_device_map

    code = getattr(inspect.unwrap(_get_device_map), "__code__", None)
    if code is None:
        return drifted("_get_device_map is not a plain function")
    if {"warn", "warning", "warning_once"}.intersection(code.co_names):
        return fixed("_get_device_map warns")
    given = {"": "cpu", "no_such_module": "cpu"}
    try:
        used = _get_device_map(Module(), given, None, None)
    except ValueError as error:
        return fixed(f"_get_device_map refuses: {error}")
    return broken() if used == given else fixed("_get_device_map drops unknown keys")


@PATCH.replaces("transformers.integrations.accelerate", "_get_device_map")
def get_device_map(original: Any) -> Any:
    @wraps(original)
    def _get_device_map(model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        model_type = getattr(getattr(model, "config", None), "model_type", None) or ""
        if isinstance(device_map, dict) and model_type.startswith(_MODELS):
            _warn(model, device_map)
        return original(model, device_map, *args, **kwargs)

    return _get_device_map


def _warn(model: Any, device_map: dict[str, Any]) -> None:
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    known = {
        *modules,
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers(remove_duplicate=False)),
    }
    unknown = [key for key in device_map if key not in known and not _left_out(model, key)]
    if not unknown:
        return
    found = {key: _closest(key, modules) for key in unknown}
    hints = [f"{key} (closest: {name})" if name else key for key, name in found.items()]
    base = model.base_model_prefix if model.base_model_prefix in modules else ""
    top = ("", base)
    parts = [name for name in modules if name not in top and name.rpartition(".")[0] in top]
    logger.warning(
        "the device_map has entries that name no module or parameter of %s: %s.  What they are "
        "meant for may follow other entries instead, or go to the CPU.%s  More: gemma4-compat map "
        "MODEL_DIR --map JSON.",
        type(model).__name__, ", ".join(hints),
        "" if all(found.values()) else f"  The model has: {', '.join(parts)}.",
    )  # fmt: skip


def _left_out(model: Any, key: str) -> bool:
    """A part that the class has but this checkpoint goes without: 31B has no audio tower."""
    try:
        for part in key.split("."):
            model = getattr(model, part)
    except AttributeError:
        return False
    return model is None


def _closest(key: str, modules: Collection[str]) -> str | None:
    """The module that a key may mean: renamed, at another depth, or misspelt."""
    from difflib import SequenceMatcher, get_close_matches

    wanted = [_FORMERLY.get(part, part) for part in key.split(".")]
    if ".".join(wanted) in modules:
        return ".".join(wanted)
    paths = (name.split(".") for name in modules)
    same_end = [path for path in paths if path[-1] == wanted[-1]]
    ratios = [SequenceMatcher(None, wanted, path).ratio() for path in same_end]
    if ratios and max(ratios) > 0.6:
        return ".".join(same_end[ratios.index(max(ratios))])
    shallow = [name for name in modules if name.count(".") <= len(wanted)]
    return next(iter(get_close_matches(".".join(wanted), shallow, n=1, cutoff=0.85)), None)
