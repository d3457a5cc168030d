"""bitsandbytes parameters with the flag _is_hf_initialized can be rebuilt."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from packaging.version import Version


def stamped(name, device="cpu"):
    """A module whose quantized parameter has the flag, as after loading with transformers."""
    import bitsandbytes as bnb

    if name == "Params4bit":
        module = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4").to(device)
    else:
        module = bnb.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False)
    module.weight._is_hf_initialized = True
    return module


@pytest.mark.regression(
    "hf_initialized_flag", r"__new__\(\) got an unexpected keyword argument '_is_hf_initialized'"
)
@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_parameter_is_rebuilt(name):
    from accelerate.utils import set_module_tensor_to_device

    module = stamped(name)
    set_module_tensor_to_device(module, "weight", "meta")
    assert type(module.weight).__name__ == name
    assert module.weight.is_meta


@pytest.fixture
def flag_is_kept():
    """Skip a harmless combination: accelerate before 1.14 loses the flag with bitsandbytes 0.50."""
    bnb, accelerate = (Version(metadata.version(n)) for n in ("bitsandbytes", "accelerate"))
    if bnb >= Version("0.50") and accelerate < Version("1.14"):
        pytest.skip("accelerate loses the flag")


@pytest.mark.usefixtures("flag_is_kept")
@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_rebuilt_parameter_keeps_flag(name):
    from accelerate.utils import set_module_tensor_to_device

    module = stamped(name)
    set_module_tensor_to_device(module, "weight", "meta")
    assert module.weight._is_hf_initialized is True


@pytest.mark.usefixtures("flag_is_kept")
def test_nested_name_and_value():
    from accelerate.utils import set_module_tensor_to_device

    module = torch.nn.ModuleDict({"layer": stamped("Params4bit")})
    value = module["layer"].weight.data.clone()
    set_module_tensor_to_device(module, "layer.weight", "meta")
    set_module_tensor_to_device(module, "layer.weight", "cpu", value=value)
    assert torch.equal(module["layer"].weight.data, value)
    assert module["layer"].weight._is_hf_initialized is True


def test_errors_keep_the_flag():
    from accelerate.utils import set_module_tensor_to_device

    module = stamped("Params4bit")
    before = module.weight
    with pytest.raises(ValueError, match="does not have a parameter"):
        set_module_tensor_to_device(module, "nothing", "cpu")
    with pytest.raises(RuntimeError):
        set_module_tensor_to_device(module, "weight", "no such device")
    assert module.weight is before
    assert module.weight._is_hf_initialized is True


def test_plain_parameters_and_buffers_are_untouched():
    from accelerate.utils import set_module_tensor_to_device

    module = torch.nn.BatchNorm1d(4)
    module.weight._is_hf_initialized = True
    set_module_tensor_to_device(module, "weight", "meta")
    set_module_tensor_to_device(module, "running_mean", "meta")
    assert module.weight.is_meta
    assert module.running_mean.is_meta
