"""A device map that sends one of two tied weights to the disk fails.

Token embeddings and head of Gemma 4 are one tensor.  With a map such as
``{"model.language_model.embed_tokens": "disk", "": 0}`` transformers leaves that tensor in the
checkpoint, since the map has its name on the disk.  The head has no name in the checkpoint, so it
is on meta as well.  accelerate is then to place the head on the GPU, and has no values for it.  The
other way round, with the head on the disk, the head's offload hook asks the checkpoint for a
tensor of the head's name.

Tied weights cannot be in two places.  Where accelerate gets such weights with their values, it
keeps them where the one that is not on the disk belongs.  The fix does the same: it reads the
values, and takes the other one from the disk, too.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...model.device_maps import covering

PATCH = Patch(
    name="tied_weights_on_disk",
    symptom=(
        "from_pretrained with the token embeddings or the head on the disk, but not both: weight "
        "is on the meta device, we need a `value` to put in on cpu, or KeyError: 'lm_head.weight'"
    ),
    affects=(("transformers>=5.5", "accelerate>=1.10"),),
    changes=(
        "dispatch_model keeps weights that are tied to each other on one device if the map sends "
        "some of them to the disk and others elsewhere, and reads their values from the "
        "checkpoint.  hf_device_map says where they are."
    ),
    ends="not fixed upstream as of transformers 5.23.0 and accelerate 1.15.0",
)


@PATCH.probe
def tied_values_are_missing() -> Finding:
    """Look for the arguments that the replacement reads."""
    import inspect

    from accelerate import big_modeling

    code = inspect.unwrap(big_modeling.dispatch_model).__code__
    gone = {"model", "device_map", "offload_index"} - {*code.co_varnames[: code.co_argcount]}
    if gone:
        return drifted(f"dispatch_model has no parameter {', '.join(sorted(gone))}")
    if "find_tied_parameters" not in code.co_names:
        return fixed("dispatch_model no longer searches tied weights by itself")
    return broken()


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Any) -> Any:
    import inspect

    signature = inspect.signature(original)

    @wraps(original)
    def dispatch_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        index, device_map = given.get("offload_index"), given["device_map"]
        if index is not None and "disk" in device_map.values():
            moved = _brought_together(given["model"], device_map, index)
            given["device_map"] = {**device_map, **moved}
        return original(*call.args, **call.kwargs)

    return dispatch_model


def _brought_together(model: Any, device_map: Any, index: Any) -> dict[str, Any]:
    """Give weights that are not on the disk alone their values.

    Returns new entries for modules that the map sends to the disk for such a weight alone.
    """
    from accelerate.utils import find_tied_parameters
    from accelerate.utils.offload import OffloadedWeightsLoader
    from torch.nn import Parameter

    moved = {}
    for names in find_tied_parameters(model):
        places = {name: device_map.get(covering(name, device_map), "cpu") for name in names}
        device = next((place for place in places.values() if place != "disk"), None)
        if device is None or "disk" not in places.values():
            continue
        weight = model.get_parameter(names[0])
        if weight.is_meta:
            source = next((name for name in names if name in index), None)
            if source is None or type(weight) is not Parameter:
                continue
            value = OffloadedWeightsLoader(index=index)[source].to(weight.dtype)
            weight = Parameter(value, requires_grad=weight.requires_grad)
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            module._parameters[leaf] = weight
            own_entry = places[name] == "disk" and covering(name, device_map) == path
            if own_entry and all(each is weight for each in module.parameters()):
                moved[path] = device
    return moved
