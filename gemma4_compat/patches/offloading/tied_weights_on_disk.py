"""Device maps that send tied weights to the disk fail, or mix weights up.

Token embeddings and head of Gemma 4 are one tensor.  With a map such as
``{"model.language_model.embed_tokens": "disk", "": 0}`` transformers leaves that tensor in the
checkpoint, since the map has its name on the disk.  The head has no name in the checkpoint, so it
is on meta as well.  accelerate is then to place the head on the GPU, and has no values for it.  The
other way round, with the head on the disk, the head's offload hook asks the checkpoint for a
tensor of the head's name.
If both are on the disk, older transformers ask for that name as well.  accelerate up to 1.14 knows
tied weights by their addresses, and those of all weights on meta are 0.  It takes every weight on
the disk for tied to the embeddings, and uses what it read for one of them for another one as soon
as the system gives out the same address twice.

Tied weights cannot be in two places.  Where accelerate gets such weights with their values, it
keeps them where the one that is not on the disk belongs.  The fix does the same: it reads the
values, and takes the other one from the disk, too.  Weights that are all on the disk are no longer
tied: each is read from the checkpoint for its forward.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
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
        "dispatch_model keeps weights that are tied to each other on one device if the map sends "
        "some of them to the disk and others elsewhere, and reads their values from the "
        "checkpoint.  hf_device_map says where they are.  Tied weights that are all on the disk "
        "are read one by one."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
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
            given["offload_index"] = index = dict(index)
            moved = _brought_together(given["model"], device_map, index)
            given["device_map"] = {**device_map, **moved}
        return original(*call.args, **call.kwargs)

    return dispatch_model


def _brought_together(model: Any, device_map: Any, index: Any) -> dict[str, Any]:
    """Give tied weights their values if not all of them are on the disk.

    Those that are all on the disk get an entry each in ``index``, and are untied: accelerate
    up to 1.14 takes all other weights on the disk for tied to them.

    Returns new entries for modules that the map sends to the disk for such a weight alone.
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
            if own_entry and all(each is weight for each in module.parameters()):
                moved[path] = device
    return moved
