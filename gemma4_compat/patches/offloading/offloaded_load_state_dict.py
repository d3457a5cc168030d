"""``load_state_dict`` of a model with offloaded modules does not load their weights.

The parameters of an offloaded module are on meta, and its hook loads the values from a map before
each forward.  ``load_state_dict`` copies the new values to the placeholders on meta, which does
nothing, and torch warns once for each.  With ``assign=True`` it replaces the placeholders without a
warning, and the next forward replaces the new values by the old ones.  All keys match in both
cases.  accelerate does not handle ``load_state_dict``.

The fix onloads each offloaded module that the state dict has values for, while torch loads its
values, and makes its hook keep them.  Weights from the disk stay in host memory from then on, and
are one tensor again if they are tied: a file on the disk holds a copy for each.  The fix raises
``ValueError`` for offloaded layers that are quantized, before anything is loaded, because their
placeholders have no quantization state that could be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...errors import RefusedError
from ...model.hooks import offload_hook
from ...objects import shadowed
from ...runtime.host.onloading import onloaded, tied_copies_follow

PATCH = Patch(
    name="offloaded_load_state_dict",
    symptom=(
        "load_state_dict of a model with offloaded modules leaves their weights as they were: "
        "copying from a non-meta parameter in the checkpoint to a meta parameter, which is a "
        "no-op; with assign=True there is no warning"
    ),
    affects=("transformers", "accelerate"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def hooks_are_not_asked() -> Finding:
    """Load the weight of an offloaded layer."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    old, new = torch.zeros((1, 1)), torch.ones((1, 1))
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    hook = AlignDevicesHook("cpu", offload=True, weights_map={"weight": old})
    add_hook_to_module(layer, hook)
    layer.load_state_dict({"weight": new}, assign=True)
    return fixed_if(torch.equal(hook.weights_map["weight"], new), "load_state_dict asks the hooks")


# The class of torch, by the name that accelerate.hooks has for it: only its hooks need the patch.
@PATCH.around("accelerate.hooks", "nn.Module.load_state_dict")
def load_state_dict(
    original: Any, self: Any, state_dict: Any, strict: bool = True, assign: bool = False
) -> Any:
    offloaded = list(_offloaded(self, state_dict))
    if not offloaded:
        return original(self, state_dict, strict, assign)
    with tied_copies_follow(self, offloaded), ExitStack() as stack:
        for module in offloaded:
            stack.enter_context(_onloaded_while_it_loads(module))
        return original(self, state_dict, strict, assign)


@contextmanager
def _onloaded_while_it_loads(module: Any) -> Iterator[None]:
    """Onload a module when torch loads its values, until its last ``load_state_dict`` hook ran."""
    load, stack = module._load_from_state_dict, ExitStack()
    hooks = OrderedDict(module._load_state_dict_post_hooks)
    hooks[object()] = lambda *_: stack.close()

    def load_from_state_dict(state_dict: Any, prefix: str, *args: Any) -> None:
        stack.enter_context(onloaded(module, keep_changes=True))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if getattr(state_dict.get(prefix + name), "is_meta", False):  # nothing to load
                state_dict[prefix + name] = tensor
        load(state_dict, prefix, *args)

    own = {"_load_from_state_dict": load_from_state_dict, "_load_state_dict_post_hooks": hooks}
    with stack, shadowed(module, **own):
        yield


def _offloaded(model: Any, state_dict: Any) -> Iterator[Any]:
    """The offloaded modules for whose tensors there are values."""
    for path, module in model.named_modules():
        hook = offload_hook(module)
        if hook is None:
            continue
        prefix, found = f"{path}." if path else "", False
        inner = module.named_modules() if hook.place_submodules else [("", module)]
        for inside, each in inner:
            start = f"{prefix}{inside}." if inside else prefix
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                value = state_dict.get(f"{start}{name}")
                if tensor is not None and tensor.is_meta and not getattr(value, "is_meta", True):
                    _refuse_quantized(tensor, f"{start}{name}")
                    found = True
        if found:
            yield module


def _refuse_quantized(tensor: Any, key: str) -> None:
    if type(tensor).__name__ in ("Params4bit", "Int8Params"):
        raise RefusedError(
            f"load_state_dict cannot load {key}: its layer is quantized and offloaded.  Load "
            f"the checkpoint with from_pretrained, or leave these tensors out of the state dict"
        )
