"""transformers' bookkeeping flag reaches constructors that do not know it.

transformers 5 stamps ``_is_hf_initialized`` on every parameter it loads.  When accelerate moves a
quantised parameter to another device, ``set_module_tensor_to_device`` rebuilds it and splats the
old parameter's ``__dict__`` into the constructor of ``Params4bit`` / ``Int8Params``.  Those have
a fixed signature before bitsandbytes 0.50.0, and the flag is not in it.  accelerate 1.14.0 takes
the flag out before and puts it back afterwards; either release alone ends the bug.

The fix does the same around the call: the flag is off the old parameter while the new one is
built, and on both afterwards.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

_FLAG = "_is_hf_initialized"

PATCH = Patch(
    name="hf_initialized_flag",
    symptom=(
        "Params4bit.__new__() (or Int8Params.__new__()) got an unexpected keyword argument "
        "'_is_hf_initialized'"
    ),
    affects=("transformers", "accelerate<1.14", "bitsandbytes<0.50"),
    changes=(
        "accelerate's set_module_tensor_to_device no longer passes the flag on to the "
        "constructors of bitsandbytes parameters; it is on the parameter again afterwards."
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/43872",
        "https://github.com/huggingface/accelerate/pull/3976",
    ),
)


@PATCH.probe
def flag_reaches_constructor() -> Finding:
    """Rebuild a stamped parameter whose class takes what bitsandbytes' classes take.

    A stand-in, recognised by its name as accelerate does it: bitsandbytes may not be imported.
    """
    import torch
    from accelerate.utils.modeling import set_module_tensor_to_device

    class Int8Params(torch.nn.Parameter):  # type: ignore[misc]
        def __new__(cls, data: Any, requires_grad: bool = False) -> Any:
            return torch.Tensor._make_subclass(cls, data, requires_grad)

    module = torch.nn.Module()
    module.weight = Int8Params(torch.zeros(1))
    setattr(module.weight, _FLAG, True)
    try:
        set_module_tensor_to_device(module, "weight", "meta")
    except TypeError as error:
        return broken() if _FLAG in str(error) else drifted(f"rebuilding raised {error}")
    return fixed("accelerate keeps the flag from the constructors")


@PATCH.replaces("accelerate.utils.modeling", "set_module_tensor_to_device")
def set_module_tensor_to_device(original: Any) -> Any:
    @wraps(original)
    def set_module_tensor_to_device(
        module: Any, tensor_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        path, _, name = tensor_name.rpartition(".")
        owner = module.get_submodule(path) if path else module
        parameter = owner._parameters.get(name)
        if parameter is None or _FLAG not in parameter.__dict__:
            return original(module, tensor_name, *args, **kwargs)
        flag = parameter.__dict__.pop(_FLAG)
        try:
            return original(module, tensor_name, *args, **kwargs)
        finally:
            setattr(parameter, _FLAG, flag)
            setattr(owner._parameters[name], _FLAG, flag)

    return set_module_tensor_to_device
