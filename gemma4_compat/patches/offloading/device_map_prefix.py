"""A device map entry also places modules whose names only begin with the entry.

transformers places the tensors of a checkpoint by the entries of the device map.  It compares the
beginning of the tensor's name with the entry, and does not check whether a module's name ends at
that point.  ``model.language_model.embed_tokens`` is also the beginning of
``model.language_model.embed_tokens_per_layer``, and ``layers.1`` of ``layers.10``.  If the entry
names the disk, transformers also leaves tensors of the other module in the checkpoint.  accelerate
compares whole names.  It tries to place the other module elsewhere, and has no values for it.

The fix compares whole names, as accelerate does.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...model.device_maps import above

PATCH = Patch(
    name="device_map_prefix",
    symptom=(
        'a device map with "model.language_model.embed_tokens" or "...layers.1" on the disk: '
        "weight is on the meta device, we need a `value` to put in on cpu"
    ),
    affects=("transformers",),
    changes=(
        "transformers' expand_device_map places a tensor by the longest entry that names it or a "
        "module that contains it, and ignores entries that are only the beginning of such a name."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def names_are_cut_short() -> Finding:
    """Place a tensor whose name begins with the name of another module."""
    from transformers.integrations.accelerate import expand_device_map

    name = "embed_tokens_per_layer.weight"
    placed = expand_device_map({"embed_tokens": "disk", "": "cpu"}, [name])
    return broken() if placed[name] == "disk" else fixed("transformers compares whole names")


@PATCH.around("transformers.integrations.accelerate", "expand_device_map")
def expand_device_map(original: Any, device_map: Any, param_names: Any) -> Any:
    if device_map is None:
        return original(device_map, param_names)
    return {name: device_map.get(_entry(name, device_map), "cpu") for name in param_names}


def _entry(name: str, device_map: Any) -> str:
    """The entry that places a tensor.  The root's "" is the default, also if the map lacks it."""
    return next((entry for entry in (name, *above(name)) if entry in device_map), "")
