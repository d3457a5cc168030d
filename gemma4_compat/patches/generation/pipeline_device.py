"""A pipeline uses the first value of a split model's device map as its device.

If the first module is offloaded, this value is "disk", which is no device, or "cpu", where the
module's weights are stored but nothing is computed.  The inputs then stay on the CPU, and all
logits are copied to the CPU in each step.

While the pipeline is made, the fix replaces the map by one of execution devices.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...runtime.host.onloading import executing_map

PATCH = Patch(
    name="pipeline_device",
    symptom=(
        "RuntimeError: Expected one of cpu, cuda, ... device type at start of device string: disk, "
        "from pipeline(model=...) with a split model; or the pipeline's device is the CPU"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def reads_the_device_map() -> Finding:
    """Check whether a pipeline still reads the device map."""
    code = code_at("transformers.pipelines.base", "Pipeline.__init__")
    reads = mentions(code, "hf_device_map")
    return fixed_if(not reads, "a pipeline no longer reads the device map")


@PATCH.around("transformers.pipelines.base", "Pipeline.__init__")
def pipeline_init(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    with executing_map(model):
        original(self, model, *args, **kwargs)
