"""``load_checkpoint_and_dispatch`` does not load the buffers of modules on the disk.

Without ``offload_buffers=True``, buffers stay in memory.  ``load_checkpoint_in_model`` passes those
of a module on the disk by, so they keep the values of a new model.  In Gemma 4 these are the factor
of each decoder layer and the bounds of the towers: the outputs are others, without an error.

The fix adds these buffers to the device map while the checkpoint is loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_at, mentions
from ...model.device_maps import covering

PATCH = Patch(
    name="disk_buffers",
    symptom="other logits, without an error, after load_checkpoint_and_dispatch to the disk",
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def buffers_are_passed_by() -> Finding:
    """Check whether buffers are told from parameters."""
    code = code_at("accelerate.utils.modeling", "load_checkpoint_in_model")
    return fixed_if(not mentions(code, "buffer_names"), "accelerate loads buffers and parameters")


@PATCH.around("accelerate.utils.modeling", "load_checkpoint_in_model")
def load_checkpoint_in_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    if (places := given.get("device_map")) is not None and not given.get("offload_buffers"):
        buffers = (name for name, _ in given["model"].named_buffers(remove_duplicate=False))
        kept = (name for name in buffers if places.get(covering(name, places)) == "disk")
        given["device_map"] = {**places, **dict.fromkeys(kept, "cpu")}
    return original(*call.args, **call.kwargs)
