"""An internal flag of transformers reaches constructors of bitsandbytes that do not accept it.

transformers 5 sets ``_is_hf_initialized`` on every parameter that it loads.  When accelerate moves
a quantized parameter to another device, ``set_module_tensor_to_device`` rebuilds it, and passes the
old parameter's ``__dict__`` as keyword arguments to the constructor of ``Params4bit`` or
``Int8Params``.  Before bitsandbytes 0.50.0 these have a fixed signature without the flag.
accelerate 1.14.0 removes the flag before and restores it afterwards.  Either release alone fixes
the bug.

The fix does the same around the call: it removes the flag from the old parameter while the new one
is built, and sets it on both afterwards.
"""

from __future__ import annotations

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
    links=(
        "https://github.com/huggingface/transformers/issues/43872",
        "https://github.com/huggingface/accelerate/pull/3976",
    ),
)


@PATCH.probe
def flag_reaches_constructor() -> Finding:
    """Rebuild a parameter with the flag, of a class with the constructor of bitsandbytes' classes.

    accelerate recognizes this stand-in by its name.  The probe must not import bitsandbytes.
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
    return fixed("accelerate no longer passes the flag to the constructors")


@PATCH.around("accelerate.utils.modeling", "set_module_tensor_to_device")
def set_module_tensor_to_device(
    original: Any, module: Any, tensor_name: str, *args: Any, **kwargs: Any
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
        for each in (parameter, owner._parameters.get(name)):
            if each is not None:
                setattr(each, _FLAG, flag)
