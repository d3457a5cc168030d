"""Dispatching a model that is on the GPU "to the CPU" leaves its weights on the GPU.

``dispatch_model`` passes ``model.state_dict()`` unchanged to an ``OffloadedWeightsLoader``, which
keeps the weights of modules mapped to "cpu".  For a model that was loaded on the GPU these are GPU
tensors, so no GPU memory is freed.  Users do not notice, because the outputs are right.  4-bit
weights also get slow: accelerate loads a quantized weight through the host, so each forward copies
it from the GPU to the host and back.

The fix copies the loader's tensors to the host once.  Tied weights stay one tensor.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...model.tensors import address

PATCH = Patch(
    name="offload_device_copy",
    symptom=(
        "dispatch_model of a model on the GPU with layers mapped to the CPU frees no GPU memory, "
        "and 4-bit layers are copied to the host and back in every forward"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def loader_keeps_tensors_where_they_are() -> Finding:
    """Check whether the loader keeps the very dict that it gets; this needs no GPU."""
    from accelerate.utils.offload import OffloadedWeightsLoader

    given: dict[str, Any] = {}
    kept = OffloadedWeightsLoader(state_dict=given).state_dict
    return broken() if kept is given else fixed("the loader makes its own dict")


@PATCH.around("accelerate.utils.offload", "OffloadedWeightsLoader.__init__")
def offloaded_weights_loader_init(
    original: Any, self: Any, state_dict: Any = None, *args: Any, **kwargs: Any
) -> None:
    if state_dict is not None:
        state_dict = _on_host(state_dict)
    original(self, state_dict, *args, **kwargs)


def _on_host(state_dict: Any) -> Any:
    """``state_dict`` itself if no tensor is on an accelerator; else a dict of host tensors."""
    import torch

    def is_elsewhere(value: Any) -> bool:  # a module may store other state than tensors
        return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")

    if not any(map(is_elsewhere, state_dict.values())):
        return state_dict
    hosted: dict[tuple[Any, ...], Any] = {}
    result = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and address(value):
            # A bitsandbytes parameter would move its quant state with it, in place.
            value = value.detach().as_subclass(torch.Tensor)
        if is_elsewhere(value):
            place = address(value)
            # Sparse tensors and tensors that wrap others have no address, and share nothing.
            layout = value.stride() if place else name
            view = value.device, place, value.shape, layout, value.dtype
            if view not in hosted:
                hosted[view] = value.detach().to("cpu")
            value = hosted[view]
        result[name] = value
    return result
