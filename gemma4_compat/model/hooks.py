"""Reading accelerate's hooks: what they offload, where it computes, where inputs belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def hooks_of(module: Any) -> tuple[Any, ...]:
    """The hooks that accelerate has put on this module.

    A module with several carries one ``SequentialHook``, which holds them.  PEFT's wrappers pass
    the attributes of a module inside them for their own; its hooks are not theirs.
    """
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def offload_hook(module: Any) -> Any | None:
    """The hook that brings this module's own weights in and out, if there is one."""
    return next((hook for hook in hooks_of(module) if getattr(hook, "offload", False)), None)


def execution_device(module: Any) -> torch.device | None:
    """The device that an offloaded module computes on; ``None`` if not offloaded."""
    hook = offload_hook(module)
    device = None if hook is None else hook.execution_device
    return None if device is None else _as_device(device)


def offload_hooks(modules: Iterable[Any]) -> Iterator[Any]:
    """The hooks that bring the weights of these modules in and out."""
    hooks = (offload_hook(module) for module in modules)
    return (hook for hook in hooks if hook is not None)


def host_tensors(weights_map: Any) -> dict[str, Any] | None:
    """The tensors that a hook's weights are among, if these are kept in host memory."""
    tensors = getattr(weights_map, "dataset", weights_map)
    tensors = getattr(tensors, "state_dict", tensors)  # of accelerate's OffloadedWeightsLoader
    return tensors if isinstance(tensors, dict) else None


def host_tensor(weights_map: Any, name: str) -> Any | None:
    """A tensor that a hook loads, if it is kept in host memory: itself, not a copy."""
    tensors = host_tensors(weights_map)
    return None if tensors is None else tensors.get(getattr(weights_map, "prefix", "") + name)


def offloaded_value(model: Any, name: str) -> Any | None:
    """The tensor of this name in a model's state dict, on the host, if a hook offloads it."""
    import torch

    # A hook that loads all below it at once sits further up than the tensor's own module.
    parent, _, name = name.rpartition(".")
    while True:
        hook = offload_hook(model.get_submodule(parent))
        if hook is not None:
            try:
                tensor = hook.weights_map[name]
            except KeyError:
                pass
            else:
                # Weights on disk would be read to the GPU; a shard of them may not fit there.
                return tensor.detach().as_subclass(torch.Tensor).to("cpu")
        if not parent:
            return None
        parent, _, leaf = parent.rpartition(".")
        name = f"{leaf}.{name}"


def placed_model(model: Any) -> Any | None:
    """The module that owns ``hf_device_map``: a base model, through any PEFT wrappers."""
    while model is not None:
        if vars(model).get("hf_device_map") is not None:
            return model
        children = getattr(model, "_modules", {})
        model = children.get("base_model") or (
            children.get("model") if hasattr(model, "peft_config") else None
        )
    return None


def input_device(model: Any) -> torch.device:
    """The device that token tensors (``input_ids``, ``attention_mask``, labels) belong on.

    That is where the token embeddings *compute*, which is not always where their weight rests: an
    offloaded weight is on meta, and comes to the execution device of its accelerate hook for each
    forward.  With ``{"": 0, "model.language_model.embed_tokens": "cpu"}`` tokens belong on GPU 0.

    A dispatched model takes tokens from any device, but it sends its outputs back to the device
    that the inputs came from: tokens left on the CPU cost a copy of all logits in every forward.
    On the device returned here they cost none, unless another GPU computes the logits.

    Args:
        model: a transformers model, split or not, or a wrapper around one: ``PeftModel``,
            ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, FSDP.

    Raises:
        TypeError: ``model`` has no token embeddings.
        ValueError: the embeddings are on meta and no hook loads them: no weights were loaded.
    """
    embedding = _token_embedding(model)
    for module in _outwards(model, embedding):
        for hook in hooks_of(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return _as_device(device)
    device = embedding.weight.device
    if device.type == "meta":
        raise ValueError(
            f"the token embeddings of this {type(model).__name__} are on the meta device, and no "
            f"accelerate hook brings them in: the model has no weights loaded"
        )
    return _as_device(device)


def _token_embedding(model: Any) -> Any:
    """The embedding module itself, inside whatever PEFT has put around it."""
    from torch import nn

    inner = model
    while isinstance(inner, nn.Module) and not hasattr(inner, "get_input_embeddings"):
        inner = getattr(inner, "module", None)  # DataParallel and its like
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if isinstance(embedding, nn.Module):
        # PEFT's wrappers hold the original first, which is the one with the hook.
        found = (each for each in embedding.modules() if isinstance(each, nn.Embedding))
        embedding = next(found, embedding)
    if getattr(embedding, "weight", None) is None:
        raise TypeError(f"{type(model).__name__} has no token embeddings (get_input_embeddings)")
    return embedding


def _outwards(model: Any, module: Any) -> Iterator[Any]:
    """The module, and what it is inside of, up to the model."""
    path = next((name for name, each in model.named_modules() if each is module), None)
    if path is None:
        yield module
        return
    while path:
        yield model.get_submodule(path)
        path = path.rpartition(".")[0]
    yield model


def _as_device(device: Any) -> torch.device:
    import torch

    return torch.device(device)
