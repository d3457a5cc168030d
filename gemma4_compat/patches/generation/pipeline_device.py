"""A pipeline uses the first value of a split model's device map as its device.

If the first module is offloaded, this value is "disk", which is no device, or "cpu", where the
module's weights are stored but nothing is computed.  The inputs then stay on the CPU, and all
logits are copied to the CPU in each step.

The fix makes the pipeline use the device that inputs belong on (``gemma4_compat.input_device``).
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, fixed
from .._code import code_of, mentions
from .._shadow import variant

PATCH = Patch(
    name="pipeline_device",
    symptom=(
        "RuntimeError: Expected one of cpu, cuda, ... device type at start of device string: disk, "
        "from pipeline(model=...) with a split model; or the pipeline's device is the CPU"
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "If the device map of its model begins with an offloaded module, a pipeline sends its "
        "inputs to the execution device of the token embeddings."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def reads_the_device_map() -> Finding:
    """Look whether a pipeline still reads the device map."""
    from transformers.pipelines.base import Pipeline

    code = code_of(Pipeline.__init__)
    if mentions(code, "hf_device_map"):
        return broken()
    return fixed("a pipeline no longer reads the device map")


@PATCH.around("transformers.pipelines.base", "Pipeline.__init__")
def pipeline_init(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    device_map = getattr(model, "hf_device_map", None)
    first = next(iter(device_map.values()), None) if device_map else None
    device = _input_device(model) if first in ("cpu", "disk") else None
    if device is None:
        original(self, model, *args, **kwargs)
        return
    original(self, variant(model, hf_device_map={"": device}), *args, **kwargs)
    self.model = model


def _input_device(model: Any) -> Any | None:
    from ...model.hooks import input_device

    try:
        return input_device(model)
    except (TypeError, ValueError):
        return None  # no token embeddings, or they have no values
