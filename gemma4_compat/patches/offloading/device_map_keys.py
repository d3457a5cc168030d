"""A device map may name modules that the model does not have.

``from_pretrained`` matches the keys of an explicit ``device_map`` against the names of the
parameters.  It does not check whether each key matches one.  ``model.multi_modal_projector``, which
earlier models have and Gemma 4 has not (it has ``model.embed_vision``), places nothing.  The
modules that the user meant follow other entries of the map or, without such an entry, go to the
CPU.  accelerate's ``dispatch_model`` does check, but it runs only after loading, and not at all for
a map with a single device.

The fix warns before any weight is read, and names the closest modules that the model has.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...engine.probing import code_of
from ...model.device_maps import closest, left_out
from ...model.parts import is_ours

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="device_map_keys",
    symptom=(
        "a device_map entry such as model.multi_modal_projector, which Gemma 4 does not have, is "
        "ignored: silently, or with accelerate's 'The following device_map keys do not "
        "match any submodules in the model' after loading"
    ),
    affects=("transformers",),
    links=(
        "https://github.com/huggingface/accelerate/issues/3584",
        "https://github.com/huggingface/accelerate/pull/3613",
    ),
)


@PATCH.probe
def unknown_keys_pass() -> Finding:
    """Pass a map with a key that no model has."""
    from torch.nn import Module
    from transformers.integrations.accelerate import _get_device_map

    code = code_of(_get_device_map)
    if {"warn", "warning", "warning_once"}.intersection(code.co_names):
        return fixed("_get_device_map warns")
    given = {"": "cpu", "no_such_module": "cpu"}
    try:
        used = _get_device_map(Module(), given, None, None)
    except ValueError as error:
        return fixed(f"_get_device_map refuses: {error}")
    return broken() if used == given else fixed("_get_device_map drops unknown keys")


@PATCH.around("transformers.integrations.accelerate", "_get_device_map")
def get_device_map(original: Any, model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(device_map, dict) and is_ours(model):
        _warn(model, device_map)
    return original(model, device_map, *args, **kwargs)


def _warn(model: Any, device_map: dict[str, Any]) -> None:
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    known = {
        *modules,
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers(remove_duplicate=False)),
    }
    unknown = [key for key in device_map if key not in known and not left_out(model, key)]
    if not unknown:
        return
    similar = {key: closest(key, modules) for key in unknown}
    hints = [f"{key} (closest: {name})" if name else key for key, name in similar.items()]
    base = model.base_model_prefix if model.base_model_prefix in modules else ""
    top = ("", base)
    parts = [name for name in modules if name not in top and name.rpartition(".")[0] in top]
    logger.warning(
        "the device_map has entries that name no module or parameter of %s: %s.  They are ignored."
        "  The modules that they were meant for may follow other entries, or go to the CPU.%s  "
        "Correct these names; gemma4-compat map MODEL --map MAP checks a map.",
        type(model).__name__, ", ".join(hints),
        "" if all(similar.values()) else f"  The model has: {', '.join(parts)}.",
    )  # fmt: skip
