"""The conditions under which the decode steps of a model are captured."""

from __future__ import annotations

from typing import Any

from ...model.hooks import execution_device, offload_hook
from ...model.parts import is_ours, tower_of
from ...model.tensors import address, own_tensors
from ..host.blocks import streamed_layers, why_not_streamed
from ..host.page_locked import in_place_of
from .cudnn import allowed_kernels
from .graph import NotCaptured

_TOWERS = ("vision", "audio")
#: The inputs of a decode step; any other input belongs to a prompt or to a user's own forward.
INPUTS = frozenset(
    {
        "input_ids", "position_ids", "attention_mask", "cache_position", "past_key_values", "cache",
        "use_cache", "return_dict", "logits_to_keep",
    }
)  # fmt: skip
#: Some releases pass these in each step; the model reads them only beside an image or sound.
_OF_A_PROMPT = frozenset(
    {
        "image_position_ids", "video_position_ids", "num_frames_per_video", "input_features_mask",
        "mm_token_type_ids",
    }
)  # fmt: skip

#: Modules whose forward hooks do nothing in a captured step: this package, and copies of its hooks;
#: and transformers, which keeps its hooks once a forward has asked for hidden states or attentions.
_IDLE_HOOKS = ("gemma4_compat.", "contextlib", "transformers.utils.output_capturing")
#: Device types that have CUDA graphs.
CAPTURED_ON = ("cuda",)


def may_capture(model: Any, generation_config: Any) -> bool:
    """Whether the steps of a call of ``generate`` may be captured.

    The user did not choose eager decoding, and asks for no attentions or hidden states.
    """
    import torch

    return (
        torch.cuda.is_available()
        and is_ours(model)
        and generation_config.compile_config is None
        and not generation_config.disable_compile
        and not generation_config.output_attentions
        and not generation_config.output_hidden_states
    )


def unknown_input(inputs: dict[str, Any]) -> str | None:
    """The reason why a step with these inputs is not captured; ``None`` if it is."""
    known = INPUTS
    if isinstance(inputs.get("attention_mask"), dict):  # the masks include those of the prompt
        known = known | _OF_A_PROMPT
    unknown = sorted(
        name for name, value in inputs.items() if name not in known and value is not None
    )
    return f"its forward is called with {', '.join(unknown)}" if unknown else None


def kind_of(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return leaf


def environment_now() -> tuple[Any, ...]:
    """The settings of PyTorch that decide which kernels run."""
    import torch

    cuda = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        allowed_kernels(),
        len(getattr(torch.library, "_impls", ())),  # kernels that replace PyTorch's
    )


def check_process() -> None:
    """Check that nothing in this process sees the operators or the modules of each step.

    Raises:
        NotCaptured: there are modes of PyTorch, or forward hooks for all modules.
    """
    import torch
    from torch.nn.modules import module as nn_module
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        raise NotCaptured("there are forward hooks for all modules")
    modes = {type(mode) for mode in _get_current_function_mode_stack()} - {DeviceContext}
    if modes or torch._C._len_torch_dispatch_stack():
        raise NotCaptured("a mode of PyTorch is active, which sees each operator")


def hooks_so_far() -> int:
    """How many hooks PyTorch has registered in this process, for modules and tensors."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


def modules_of_a_step(model: Any) -> dict[str, Any]:
    """The modules that a decode step runs, by name: all but the towers."""
    return {name: module for name, module in model.named_modules() if tower_of(name) not in _TOWERS}


def streams_layers(model: Any) -> bool:
    """Whether a step copies layers from the CPU."""
    return bool(streamed_layers(modules_of_a_step(model).values()))


def device_or_obstacle(model: Any, modules: dict[str, Any]) -> tuple[Any, str | None]:
    """The GPU to capture on and ``None``, or ``None`` and the reason not to capture."""
    try:
        check_process()
        device = _device_of_a_step(modules)
        _check_repeatable(model, modules)
    except NotCaptured as why:
        return None, str(why)
    return device, None


def _device_of_a_step(modules: dict[str, Any]) -> Any:
    """The one GPU that all of these modules compute on.

    Raises:
        NotCaptured: there is no such GPU, or accelerate copies weights to it in each forward, or
            the CPU looks up rows of an embedding.
    """
    import torch

    devices = set()
    for name, module in modules.items():
        own = own_tensors(module)
        if any(address(tensor) is None for tensor in own):
            raise NotCaptured(f"{name} has a tensor without storage")
        hook = offload_hook(module)
        if hook is None:
            devices |= {tensor.device for tensor in own}
        elif not isinstance(module, torch.nn.Embedding):
            devices |= {tensor.device for tensor in own if not tensor.is_meta}
            if any(tensor.is_meta for tensor in own):
                why = why_not_streamed(hook, module)
                if why is not None:
                    raise NotCaptured(f"{name} is offloaded, and {why}")
                devices.add(_with_index(execution_device(module)))
        elif getattr(in_place_of(hook), "nbytes", None) is None:
            raise NotCaptured(f"the CPU looks up the rows of {name}")
    if len(devices) != 1 or next(iter(devices)).type not in CAPTURED_ON:
        named = " and ".join(sorted(map(str, devices)))
        raise NotCaptured(f"its decoder is on {named}, not on one GPU")
    return devices.pop()


def _with_index(device: Any) -> Any:
    """The same device; accelerate may keep it as ``"cuda"``, which is the current GPU."""
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_repeatable(model: Any, modules: dict[str, Any]) -> None:
    """Check that a graph repeats all that the forward does.

    Raises:
        NotCaptured: the model is compiled or in training mode, has forward hooks, or has 8-bit
            layers that search for outliers.
    """
    import torch

    scripts = (torch.jit.ScriptModule, torch.jit.ScriptFunction, torch.ScriptMethod)
    if any(module.training for module in modules.values()):
        raise NotCaptured("the model is in training mode")
    for name, module in modules.items():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(str(hook.__module__).startswith(_IDLE_HOOKS) for hook in hooks):
            raise NotCaptured(f"{name} has a forward hook")
        if any(isinstance(each, scripts) for each in (module, *vars(module).values())):
            raise NotCaptured(f"{name} runs TorchScript, whose values may change in each step")
        threshold = getattr(getattr(module, "state", None), "threshold", 0)
        if type(module).__name__ == "Linear8bitLt" and threshold:
            raise NotCaptured(
                "its 8-bit layers search their inputs for outliers, which needs the CPU in each "
                "step (BitsAndBytesConfig(llm_int8_threshold=0.0) turns the search off)"
            )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise NotCaptured("the model is compiled")
