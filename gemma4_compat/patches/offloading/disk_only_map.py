"""A device map that sends the whole model to the disk leaves it without weights.

``from_pretrained`` leaves weights for the disk in the checkpoint, and lets accelerate attach the
hooks that read them.  Up to transformers 5.12 it does so only if the map names more than one
device.  With ``{"": "disk"}`` the model has no weights and no hooks.  accelerate's
``dispatch_model`` has the same condition up to 1.14, and raises an error.

The fix attaches the hooks for such a map, too.  The model computes on the CPU, as it does with the
releases that do not have this bug.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed
from .._code import mentions

PATCH = Patch(
    name="disk_only_map",
    symptom=(
        'device_map={"": "disk"}: Cannot copy out of meta tensor, or Tensor on device meta is not '
        "on the expected device, in the first forward; or You are trying to offload the whole "
        "model to the disk"
    ),
    affects=("transformers", "accelerate"),
    # The embeddings and the head are tied, and both are on the disk.
    requires=("tied_weights_on_disk",),
    changes=(
        "A model whose device map names only the disk gets accelerate's offload hooks: "
        "from_pretrained attaches them, and dispatch_model accepts such maps."
    ),
    note="transformers 5.13 and accelerate 1.15 fix it together.",
    unreported="Found by the tests of this package; no report is known upstream.",
)

_OLD_TRANSFORMERS = "transformers<5.13"
_INDEX = "_disk_offload_index"


@PATCH.probe
def disk_alone_is_not_dispatched() -> Finding:
    """Look for accelerate's error.  For transformers compare versions: its code shows nothing."""
    import inspect

    import transformers
    from accelerate import big_modeling
    from packaging.version import Version

    code = inspect.unwrap(big_modeling.dispatch_model).__code__
    if "force_hooks" not in code.co_varnames[: code.co_argcount]:
        return drifted("dispatch_model has no parameter force_hooks")
    if mentions(code, "trying to offload the whole model"):
        return broken()
    if Version(transformers.__version__) < Version("5.13.0.dev0"):
        return broken()
    return fixed("models that are wholly on the disk are dispatched")


@PATCH.replaces("accelerate.big_modeling", "dispatch_model", when="accelerate<1.15")
def dispatch_model(original: Any) -> Any:
    import inspect

    signature = inspect.signature(original)

    @wraps(original)
    def dispatch_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if _is_disk_alone(given["device_map"]):
            given["force_hooks"] = True
            if given.get("main_device") is None:
                given["main_device"] = "cpu"
        return original(*call.args, **call.kwargs)

    return dispatch_model


@PATCH.replaces(
    "transformers.modeling_utils",
    "PreTrainedModel._load_pretrained_model",
    when=_OLD_TRANSFORMERS,
)
def load_pretrained_model(original: Any) -> Any:
    @wraps(original)
    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        # expected_keys is passed only if an adapter is loaded.
        if not args and not kwargs and _is_disk_alone(load_config.device_map):
            vars(model)[_INDEX] = result[1]
        return result

    return _load_pretrained_model


@PATCH.replaces(
    "transformers.modeling_utils",
    "PreTrainedModel._finalize_model_loading",
    when=_OLD_TRANSFORMERS,
)
def finalize_model_loading(original: Any) -> Any:
    @wraps(original)
    def _finalize_model_loading(model: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, load_config, *args, **kwargs)
        index = vars(model).pop(_INDEX, None)
        if index is not None:
            from transformers.integrations.accelerate import accelerate_dispatch

            accelerate_dispatch(
                model,
                load_config.hf_quantizer,
                load_config.device_map,
                load_config.disk_offload_folder,
                index,
                load_config.offload_buffers,
            )
        return result

    return _finalize_model_loading


def _is_disk_alone(device_map: Any) -> bool:
    return bool(device_map) and set(device_map.values()) == {"disk"}
