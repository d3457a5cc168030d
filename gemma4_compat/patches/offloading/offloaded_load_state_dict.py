"""``load_state_dict`` of a model with offloaded modules does not load their weights.

The parameters of an offloaded module are on meta, and its hook loads the values from a map before
each forward.  ``load_state_dict`` copies the new values to the placeholders on meta, which does
nothing, and torch warns once for each.  With ``assign=True`` it replaces the placeholders without a
warning, and the next forward replaces the new values by the old ones.  All keys match in both
cases.  accelerate does not handle ``load_state_dict``.

The fix onloads each offloaded module that the state dict has values for, loads its values, and
makes its hook keep them.  Weights from the disk stay in host memory from then on, and are one
tensor again if they are tied: a file on the disk holds a copy for each.  The fix raises
``ValueError`` for offloaded layers that are quantised, before anything is loaded, because their
placeholders have no quantisation state that could be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ...engine import Finding, Patch, fixed_if
from ...model.hooks import offload_hook
from .._offload import onloaded, tied_copies_follow

PATCH = Patch(
    name="offloaded_load_state_dict",
    symptom=(
        "load_state_dict of a model with offloaded modules leaves their weights as they were: "
        "copying from a non-meta parameter in the checkpoint to a meta parameter, which is a "
        "no-op; with assign=True there is no warning"
    ),
    affects=("transformers", "accelerate"),
    changes=(
        "torch's Module.load_state_dict loads the weights of modules that accelerate's hooks "
        "offload.  It raises ValueError for those of quantised layers.  Other modules, and models "
        "with load_state_dict pre-hooks, are loaded as before."
    ),
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
    # torch warns if hooks of a user's change the values while they are loaded.
    if not offloaded or any(module._load_state_dict_pre_hooks for module in self.modules()):
        return original(self, state_dict, strict, assign)
    for module, names in offloaded:
        _refuse_quantised(module, names)
    given = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        given._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for module, names in offloaded:
        for name, key in [*names.items()]:
            tensor = _tensor(module, name)
            if tensor.shape == given[key].shape:
                given[key] = tensor
            else:  # torch reports it
                del names[name]
    try:
        return original(self, given, strict, assign)
    finally:  # torch loads what fits before it raises
        with tied_copies_follow(self, [module for module, _ in offloaded]):
            for module, names in offloaded:
                values = {name: state_dict[key] for name, key in names.items()}
                with onloaded(module, keep_changes=True):
                    original(module, values, False, assign)


def _offloaded(model: Any, state_dict: Any) -> Iterator[tuple[Any, dict[str, str]]]:
    """Offloaded modules, and the keys of the values for their tensors."""
    for path, module in model.named_modules():
        hook = offload_hook(module)
        if hook is None:
            continue
        prefix = f"{path}." if path else ""
        inner = module.named_modules() if hook.place_submodules else [("", module)]
        names = {}
        for inside, each in inner:
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                full = f"{inside}.{name}" if inside else name
                value = state_dict.get(f"{prefix}{full}")
                if tensor is None or not tensor.is_meta or getattr(value, "is_meta", True):
                    continue
                names[full] = f"{prefix}{full}"
        if names:
            yield module, names


def _tensor(module: Any, name: str) -> Any:
    parent, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)


def _refuse_quantised(module: Any, names: dict[str, str]) -> None:
    for name, key in names.items():
        kind = type(_tensor(module, name)).__name__
        if kind in ("Params4bit", "Int8Params"):
            raise ValueError(
                f"load_state_dict cannot load {key}: its layer is quantised and offloaded.  Load "
                f"the checkpoint with from_pretrained, or leave these tensors out of the state dict"
            )
