"""FSDP2 hangs if a batch with images meets a batch of text, and the towers are trained.

After a backward, FSDP2 reduces the gradients of a unit's parameters in one collective.  It leaves
out parameters without a gradient.  If one process has images and another has none, their
collectives have different sizes: NCCL waits for ever or adds up other values, gloo aborts.  Their
order differs, too: with images that are trained, the input of the first layer has a gradient, and
its unit is reduced before the root.  Without them, it is reduced after the root.

The fix asks all processes first which trained parameters of the towers have a gradient anywhere.
The others contribute zeros.  A parameter that no process used has no gradient, as without the fix.
The root is reduced last.  Models without trained parameters of the towers ask nothing.  Neither do
models without a module of Gemma 4 or 3n, whatever the names of their parts are.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...engine.probing import code_of, mentions
from ...model.parts import AUDIO, MODELS, VISION, part_of

PATCH = Patch(
    name="fsdp_unused_tower",
    symptom=(
        "with FSDP2, training an adapter on the towers hangs, or gloo aborts, if only some "
        "processes have images or sound"
    ),
    affects=("transformers",),
    links=("https://github.com/NVIDIA-NeMo/Automodel/pull/2763",),
)

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


@PATCH.probe
def unused_parameters_are_left_out() -> Finding:
    """Look for what this reads; torch has a setting for zeros, which is off by default."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    FSDPParam.unsharded_param  # noqa: B018
    chooses = mentions(code_of(FSDPParamGroup.post_backward), "unsharded_accumulated_grad")
    chooses = chooses or hasattr(FSDPParamGroup, "_get_unsharded_grad_to_reduce")  # torch 2.15
    return fixed_if(not chooses, "FSDP2 reduces parameters without a gradient, too")


@PATCH.around(_STATE, "FSDPState._init_fqns")
def init_fqns(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Look at the whole model: a unit inside a tower may have classes of PEFT alone."""
    classes = {cls for module in self._modules[0].modules() for cls in type(module).__mro__}
    for group in (each for state in self._state_ctx.all_states for each in _groups(state)):
        group._is_of_gemma = any(cls.__module__.startswith(MODELS) for cls in classes)
    return original(self, *args, **kwargs)


@PATCH.around(_STATE, "FSDPState._root_post_backward_final_callback")
def root_post_backward_final_callback(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    by_user = getattr(self._state_ctx, "manual_backward_finalization_active", False)
    groups = [(state, group) for state in self._state_ctx.all_states for group in _groups(state)]
    if not by_user and any(_trained_in_towers(group) for _, group in groups):
        # The original begins with the root.
        for state, group in reversed(groups):
            if not state._is_root and group._training_state.name != "POST_BACKWARD":
                group.post_backward()
    return original(self, *args, **kwargs)


@PATCH.around(_GROUP, "FSDPParamGroup.post_backward")
def post_backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.reduce_grads and not getattr(self, "reduce_scatter_unused_params", False):
        trained = [each for each in _trained_in_towers(self) if hasattr(each, "_unsharded_param")]
        if trained:
            _give_zeros(self, trained)
    return original(self, *args, **kwargs)


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a unit; old releases of torch have at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _trained_in_towers(group: Any) -> list[Any]:
    return [
        parameter
        for parameter in group.fsdp_params
        if getattr(group, "_is_of_gemma", True)
        and parameter.sharded_param.requires_grad
        and part_of(parameter._param_fqn or "") in (VISION, AUDIO)
    ]


def _give_zeros(group: Any, trained: list[Any]) -> None:
    """Give a gradient of zeros to the parameters that other processes have a gradient of."""
    import torch
    from torch import distributed

    own = [
        parameter.unsharded_param.grad is not None
        or getattr(parameter, "unsharded_accumulated_grad", None) is not None
        for parameter in trained
    ]
    used = torch.tensor(own, dtype=torch.uint8, device=group.device)
    processes = [group._reduce_scatter_process_group]
    if hasattr(group.mesh_info, "replicate_process_group"):  # HSDP
        processes.append(group.mesh_info.replicate_process_group)
    for each in processes:
        distributed.all_reduce(used, distributed.ReduceOp.MAX, group=each)
    for parameter, here, anywhere in zip(trained, own, used.tolist(), strict=True):
        if anywhere and not here:
            weight = parameter.unsharded_param
            weight.grad = torch.zeros_like(weight, dtype=getattr(weight, "grad_dtype", None))
