"""Device maps that send tied weights to the disk fail, or mix weights up.

The token embeddings and the head of Gemma 4 are one tensor.  With a map such as
``{"model.language_model.embed_tokens": "disk", "": 0}`` transformers leaves this tensor in the
checkpoint, because the map sends its name to the disk.  The checkpoint has no tensor for the head,
so the head is on meta as well.  accelerate then tries to place the head on the GPU, and has no
values for it.  In the opposite case, with the head on the disk, the head's offload hook reads a
tensor with the head's name from the checkpoint, which has none.
If both are on the disk, older transformers read that name as well.  accelerate up to 1.14 also
recognizes tied weights by their addresses, which are 0 for all weights on meta.  It treats every
weight on the disk as tied to the embeddings.  As soon as the system reuses an address, it uses the
values of one weight for another.

Tied weights cannot be in two places.  If accelerate gets such weights with their values, it keeps
all of them on the device of the one that is not on the disk.  The fix does the same: it reads the
values, and does not leave the other weight on the disk.  Tied weights that are all on the disk are
untied, and each is read from the checkpoint for its forward.
"""

from __future__ import annotations

import inspect
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_of
from ...model.device_maps import covering

PATCH = Patch(
    name="tied_weights_on_disk",
    symptom=(
        "from_pretrained with the token embeddings or the head on the disk: weight is on the meta "
        "device, we need a `value` to put in on cpu, or KeyError: 'lm_head.weight'; with both, "
        "before accelerate 1.15, also weights of one module in another"
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "If a map sends some of several tied weights to the disk, dispatch_model keeps them all on "
        "the device of the others, and reads their values from the checkpoint.  hf_device_map "
        "gives this device.  Tied weights that are all on the disk are read one by one."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def tied_values_are_missing() -> Finding:
    """Look for the arguments that the replacement reads."""

    from accelerate import big_modeling

    code = code_of(big_modeling.dispatch_model)
    gone = {"model", "device_map", "offload_index"} - {*code.co_varnames[: code.co_argcount]}
    if gone:
        return drifted(f"dispatch_model has no parameter {', '.join(sorted(gone))}")
    searches = "find_tied_parameters" in code.co_names
    return fixed_if(not searches, "dispatch_model no longer searches for tied weights itself")


@PATCH.around("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    index, device_map = given.get("offload_index"), given["device_map"]
    if index is not None and "disk" in device_map.values():
        given["offload_index"] = index = dict(index)
        moved = _keep_on_one_device(given["model"], device_map, index)
        given["device_map"] = {**device_map, **moved}
    return original(*call.args, **call.kwargs)


def _keep_on_one_device(model: Any, device_map: Any, index: Any) -> dict[str, Any]:
    """Give tied weights their values if not all of them are on the disk.

    Tied weights that are all on the disk get one entry each in ``index``, and are untied, because
    accelerate up to 1.14 treats all other weights on the disk as tied to them.

    Returns new device map entries for modules whose only weight leaves the disk.
    """
    from accelerate.utils import find_tied_parameters
    from accelerate.utils.offload import OffloadedWeightsLoader
    from torch.nn import Parameter

    moved = {}
    for names in find_tied_parameters(model):
        places = {name: device_map.get(covering(name, device_map), "cpu") for name in names}
        if "disk" not in places.values():
            continue
        device = next((place for place in places.values() if place != "disk"), None)
        source = next((name for name in names if name in index), None)
        weight = model.get_parameter(names[0])
        if weight.is_meta:
            if source is None or type(weight) is not Parameter:
                continue
            if device is not None:
                value = OffloadedWeightsLoader(index=index)[source].to(weight.dtype)
                weight = Parameter(value, requires_grad=weight.requires_grad)
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if device is None:
                index[name] = index[source]
                module._parameters[leaf] = Parameter(weight.data, weight.requires_grad)
                continue
            module._parameters[leaf] = weight
            own_entry = places[name] == "disk" and covering(name, device_map) == path
            if own_entry and all(parameter is weight for parameter in module.parameters()):
                moved[path] = device
    return moved
