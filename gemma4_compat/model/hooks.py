"""Reads accelerate's hooks: what they offload, the execution device, the device for inputs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .device_maps import above

if TYPE_CHECKING:
    import torch


def hooks_of(module: Any) -> tuple[Any, ...]:
    """The hooks that accelerate has attached to this module.

    A module with several hooks has one ``SequentialHook``, which contains them.  PEFT's wrappers
    expose the attributes of the module inside them; its hooks are not counted as theirs.
    """
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def dispatched_now() -> Callable[[], list[str]]:
    """A function that says which of the models that have hooks now are still in use."""
    models: weakref.WeakSet[Any] = weakref.WeakSet()
    if "accelerate.hooks" in sys.modules and "torch.nn" in sys.modules:
        kind = sys.modules["torch.nn"].Module
        found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
        mapped = [each for each in found if "hf_device_map" in vars(each)]
        models.update(each for each in mapped if any(map(hooks_of, each.modules())))

    def older() -> list[str]:
        if models:
            gc.collect()  # a model and its hooks refer to each other
        names = ", ".join(sorted(type(model).__name__ for model in models))
        text = f"dispatched before this package was imported, without its patches: {names}; load"
        return [f"{text} {'it' if len(models) == 1 else 'them'} again"] if names else []

    return older


def offload_hook(module: Any) -> Any | None:
    """The hook that onloads and offloads this module's own weights, or ``None``."""
    return next((hook for hook in hooks_of(module) if getattr(hook, "offload", False)), None)


def execution_device(module: Any) -> torch.device | None:
    """The execution device of an offloaded module; ``None`` if it is not offloaded."""
    import torch

    device = getattr(offload_hook(module), "execution_device", None)
    return None if device is None else torch.device(device)


def offload_hooks(modules: Iterable[Any]) -> Iterator[Any]:
    """The hooks that onload and offload the weights of these modules."""
    return filter(None, map(offload_hook, modules))


def host_tensors(weights_map: Any) -> dict[str, Any] | None:
    """The dict of tensors that a hook loads from; ``None`` if they are not in host memory."""
    tensors = getattr(weights_map, "dataset", weights_map)
    tensors = getattr(tensors, "state_dict", tensors)  # an OffloadedWeightsLoader of accelerate
    return tensors if isinstance(tensors, dict) else None


def host_tensor(weights_map: Any, name: str) -> Any | None:
    """The tensor in host memory that a hook loads, not a copy; ``None`` if it is not there."""
    tensors = host_tensors(weights_map)
    return None if tensors is None else tensors.get(getattr(weights_map, "prefix", "") + name)


def offloaded_value(model: Any, name: str) -> Any | None:
    """The offloaded tensor of this state dict name, on the CPU; ``None`` if no hook offloads it."""
    import torch

    # A hook that loads all its submodules' weights at once is on a parent of the tensor's module.
    for module in above(name):
        hook = offload_hook(model.get_submodule(module))
        if hook is None:
            continue
        try:
            tensor = hook.weights_map[name.removeprefix(f"{module}." if module else "")]
        except KeyError:
            continue
        # accelerate would load weights on disk to the GPU, where a shard may not fit.
        return tensor.detach().as_subclass(torch.Tensor).to("cpu")
    return None


def placed_model(model: Any) -> Any | None:
    """The module that has ``hf_device_map``: the base model, inside any PEFT wrappers."""
    while model is not None:
        if vars(model).get("hf_device_map") is not None:
            return model
        children = getattr(model, "_modules", {})
        model = children.get("base_model") or (
            children.get("model") if hasattr(model, "peft_config") else None
        )
    return None


def input_device(model: Any) -> torch.device:
    """Return the device to put token tensors on (``input_ids``, ``attention_mask``, labels).

    This is the execution device of the token embeddings.  Their weight may be stored elsewhere: an
    offloaded weight is on meta, and its accelerate hook onloads it for each forward.  For example,
    with ``{"": 0, "model.language_model.embed_tokens": "cpu"}`` it is GPU 0.

    A dispatched model accepts tokens from any device, but copies its outputs back to the device of
    the inputs.  If the tokens are on the CPU, every forward copies all logits.  If they are on the
    returned device, it does not, unless another GPU computes the logits.

    Args:
        model: a transformers model, split or not, or a wrapper around one: ``PeftModel``,
            ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, FSDP.

    Raises:
        TypeError: ``model`` has no token embeddings.
        ValueError: the embeddings are on meta and no hook loads them: no weights were loaded.

    Example:
        >>> inputs = tokenizer("Hello", return_tensors="pt").to(gemma4_compat.input_device(model))
        >>> output = model.generate(**inputs, max_new_tokens=1)
    """
    import torch

    embedding = _token_embedding(model)
    path = next((name for name, each in model.named_modules() if each is embedding), "")
    # The modules that contain it have hooks, too.
    for module in (embedding, *map(model.get_submodule, above(path))):
        for hook in hooks_of(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    device = _weight_of(embedding).device
    if device.type == "meta":
        raise ValueError(
            f"the token embeddings of this {type(model).__name__} are on the meta device, and no "
            f"accelerate hook loads them: the model has no weights loaded"
        )
    return torch.device(device)


def _token_embedding(model: Any) -> Any:
    """The token embedding module, inside any PEFT wrappers."""
    from torch import nn

    inner = model
    while isinstance(inner, nn.Module) and not hasattr(inner, "get_input_embeddings"):
        inner = getattr(inner, "module", None)  # DataParallel and similar wrappers
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if isinstance(embedding, nn.Module):
        # In PEFT's wrappers the original, which has the hook, comes first.
        originals = (each for each in embedding.modules() if isinstance(each, nn.Embedding))
        embedding = next(originals, embedding)
    if _weight_of(embedding) is None:
        raise TypeError(f"{type(model).__name__} has no token embeddings (get_input_embeddings)")
    return embedding


def _weight_of(embedding: Any) -> Any:
    """The weight.  In a QAT checkpoint ``weight`` is a property, which dequantizes all rows."""
    packed = getattr(embedding, "embedding_quantized", None)
    return getattr(embedding, "weight", None) if packed is None else packed
