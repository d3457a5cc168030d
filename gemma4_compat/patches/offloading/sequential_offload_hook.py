"""accelerate overlooks offloaded weights of modules with two hooks.

``has_offloaded_params`` checks whether the hook of a module is an ``AlignDevicesHook`` that
offloads.  A module with several hooks has one ``SequentialHook``, which contains them, so the
answer is no.  ``align_module_device`` then moves the weights as if they were on a device, but they
are on meta.  So ``get_state_dict_offloaded_model`` and ``Accelerator.save_model`` fail.

``cpu_offload`` and ``disk_offload`` attach two hooks to the module that they get, if it has its own
tensors.  ``dispatch_model`` attaches two to offloaded modules below another entry of the device
map.

The fix checks all hooks of a module, and aligns the module with the hook that offloads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from ...model.hooks import hooks_of, offload_hook
from .._code import mentions

PATCH = Patch(
    name="sequential_offload_hook",
    symptom=(
        "Accelerator.save_model or get_state_dict_offloaded_model of a model with offloaded "
        "modules: position_embedding_table is on the meta device, we need a `value` to put in on "
        "cpu, or You can't save the model since some parameters are on the meta device"
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "accelerate's has_offloaded_params and align_module_device find the hook that offloads a "
        "module among several hooks."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def sequential_hook_is_overlooked() -> Finding:
    """Look which hooks the function checks.  accelerate's hooks are not imported yet."""
    import inspect

    from accelerate.utils import modeling

    code = inspect.unwrap(modeling.has_offloaded_params).__code__
    if "AlignDevicesHook" not in code.co_varnames:
        return drifted("has_offloaded_params does not look for an AlignDevicesHook")
    if mentions(code, "SequentialHook"):
        return fixed("accelerate checks all hooks of a module")
    return broken()


@PATCH.replaces("accelerate.utils.modeling", "has_offloaded_params")
def has_offloaded_params(original: Any) -> Any:
    @wraps(original)
    def has_offloaded_params(module: Any) -> bool:
        return bool(original(module)) or _is_overlooked(module)

    return has_offloaded_params


@PATCH.replaces("accelerate.utils.modeling", "align_module_device")
def align_module_device(original: Any) -> Any:
    @wraps(original)
    def align_module_device(module: Any, execution_device: Any = None) -> Any:
        if _is_overlooked(module):
            return aligned(module, execution_device)
        return original(module, execution_device)

    @contextmanager
    def aligned(module: Any, execution_device: Any) -> Iterator[None]:
        hook: Any = offload_hook(module)
        own = hook.execution_device
        try:
            hook.execution_device = own if execution_device is None else execution_device
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = own

    return align_module_device


def _is_overlooked(module: Any) -> bool:
    """Whether one of several hooks of the module offloads it."""
    return len(hooks_of(module)) > 1 and offload_hook(module) is not None
