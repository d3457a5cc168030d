"""Read a loaded model in one pass: where its tensors are stored, and where they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..model.device_maps import above
from ..model.hooks import host_tensor, offload_hook
from ..model.parts import PARTS, fused_experts, part_of
from ..model.quant_state import tensors_of
from ..results.text import plural
from .mapped import OFFLOAD_FLAG


@dataclass(frozen=True)
class Part:
    """A part of the model; devices are "cuda:0", "cpu" or "disk".

    ``linear`` counts its linear layers by "4-bit", "8-bit", "bf16"...  ``weights`` are bytes by the
    device that stores them, with the quant states of bitsandbytes.  ``computes_on`` are the
    execution devices.
    """

    name: str
    linear: Mapping[str, int]
    weights: Mapping[str, int]
    computes_on: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A problem, the modules or tensors that have it, and the patch that prevents it."""

    text: str
    modules: tuple[str, ...]
    patch: str | None = None


@dataclass
class _Tensor:
    """A tensor of the model; tied tensors count as one.

    ``adapter`` is the adapter that it belongs to, or ``None``.
    """

    name: str
    module: str
    tensor: Any
    adapter: str | None
    rests_on: str  # where it is stored; "meta": nowhere
    computes_on: str
    offloaded: bool


class Loaded:
    """A loaded model, read in one pass; nothing is moved, loaded or changed."""

    def __init__(self, model: Any) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.adapter_of = {
            id(tensor): adapter
            for module in self.modules.values()
            for adapter, tensor in _adapter_tensors(module)
        }
        tensors = list(self._tensors())
        #: the tensors of the base model, and those of adapters
        self.own = [each for each in tensors if each.adapter is None]
        self.adapted = [each for each in tensors if each.adapter is not None]
        kinds = {each.module: _linear_kind(self.modules[each.module]) for each in self.own}
        #: the linear layers, and how they are stored: "4-bit", "8-bit", "bf16"...
        self.linear = {path: kind for path, kind in kinds.items() if kind is not None}

    def _tensors(self) -> Iterator[_Tensor]:
        seen: set[Any] = set()
        for path, module in self.modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or _identity(tensor) in seen:
                    continue
                full = f"{path}.{name}" if path else name
                device, adapter = device_text(tensor.device), self.adapter_of.get(id(tensor))
                hooked = self._offloaded(full) if device == "meta" else None
                rests_on, computes_on, stored = hooked or (device, device, tensor)
                same = {_identity(each) for each in (tensor, stored) if each is not None}
                if not same & seen:
                    yield _Tensor(full, path, tensor, adapter, rests_on, computes_on, bool(hooked))
                seen |= same

    def _offloaded(self, full: str) -> tuple[str, str, Any] | None:
        """Where a hook stores a tensor and computes with it, and the tensor if it is in memory.

        The hook is the module's own, or that of an outer module that places its submodules.
        """
        path = full.rpartition(".")[0]
        for outer in above(full):
            hook = offload_hook(self.modules[outer])
            if hook is not None and (outer == path or getattr(hook, "place_submodules", False)):
                name = full.removeprefix(f"{outer}." if outer else "")
                stored = host_tensor(hook.weights_map, name)
                if stored is not None or _is_on_disk(hook.weights_map, name):
                    place = "disk" if stored is None else device_text(stored.device)
                    return place, device_text(hook.execution_device), stored
        return None

    # -- the parts of an inspection

    def parts(self) -> Iterator[Part]:
        for name in PARTS:
            tensors = [each for each in self.own if part_of(each.name) == name]
            weights: dict[str, int] = {}
            for each in tensors:
                _add(weights, each.rests_on, each.tensor)
                for state, place in self._quant_state(each):
                    _add(weights, place, state)
            paths = {each.module for each in tensors} & self.linear.keys()
            linear = Counter(self.linear[path] for path in paths)
            computing = {each.computes_on for each in tensors} - {"meta"}
            if tensors:
                yield Part(name, dict(sorted(linear.items())), weights, tuple(sorted(computing)))

    def _quant_state(self, each: _Tensor) -> Iterator[tuple[Any, str]]:
        """The tensors that bitsandbytes keeps for a weight, each with the device that stores it."""
        state, scales = (getattr(each.tensor, name, None) for name in ("quant_state", "SCB"))
        for tensor in () if state is None else tensors_of(state).values():
            yield tensor, device_text(tensor.device)
        if scales is None and type(each.tensor).__name__ == "Int8Params":
            scales = getattr(getattr(self.modules[each.module], "state", None), "SCB", None)
        if scales is not None:
            # On meta, they are offloaded with the weight.
            hooked = self._offloaded(f"{each.module}.SCB") if scales.is_meta else None
            yield scales, hooked[0] if hooked else device_text(scales.device)

    def offloaded(self) -> dict[str, int]:
        hooked = [each for each in (*self.own, *self.adapted) if each.offloaded]
        ways = {(each.module, f"{each.rests_on} to {each.computes_on}") for each in hooked}
        return dict(sorted(Counter(way for _, way in ways).items()))

    def adapters(self) -> dict[str, dict[str, dict[str, int]]]:
        adapters: dict[str, dict[str, dict[str, int]]] = {}
        for each in sorted(self.adapted, key=lambda each: PARTS.index(part_of(each.name))):
            parts = adapters.setdefault(str(each.adapter), {})
            _add(parts.setdefault(part_of(each.name), {}), each.rests_on, each.tensor)
        return adapters

    def active(self) -> tuple[str, ...]:
        layers = (m for m in self.modules.values() if hasattr(m, "get_base_layer"))
        enabled = (layer for layer in layers if not getattr(layer, "disable_adapters", False))
        names = (getattr(layer, "active_adapters", ()) for layer in enabled)
        return tuple(dict.fromkeys(name for each in names for name in each))

    # -- what is wrong

    def problems(self, quantization: str | None) -> Iterator[Problem]:
        damaged = [
            each.module.removesuffix(".base_layer")
            for each in self.own
            if any(place == "meta" for _, place in self._quant_state(each))
        ]
        if damaged:
            text = f"the quant state of {plural(len(damaged), 'quantized layer')} has no values"
            text += ": import gemma4_compat before the model is loaded, and load it again"
            yield Problem(text, tuple(damaged), "quant_state_offload")
        why = "on meta, without a hook that onloads them: no weights were loaded"
        kinds = ((self.own, "", None), (self.adapted, " of adapters", "peft_redispatch"))
        for tensors, of, patch in kinds:
            if lost := [each.name for each in tensors if each.rests_on == "meta"]:
                yield Problem(f"{plural(len(lost), 'tensor')}{of} {why}", tuple(lost), patch)
        bits = (quantization or "").partition(" ")[0]
        if bits in ("4-bit", "8-bit") and self.linear and bits not in self.linear.values():
            layers = [path.removesuffix(".base_layer") for path in sorted(self.linear)]
            text = (
                f"{bits} was requested, but not one of {plural(len(layers), 'linear layer')} is "
                f"quantized: with {OFFLOAD_FLAG}=True transformers quantizes nothing that the "
                "device map puts on the CPU or the disk. Load the model without that flag, or "
                "with a device map that uses a GPU"
            )
            yield Problem(text, tuple(layers))


# -- reading a model ------------------------------------------------------------------------------


def _identity(tensor: Any) -> Any:
    """A key that is equal for tied tensors, which may be several objects that share memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    try:
        return tensor.device, tensor.data_ptr(), tuple(tensor.shape)
    except RuntimeError:  # a tensor without storage: a fake tensor or a wrapper
        return id(tensor)


def _add(total: dict[str, int], device: str, tensor: Any) -> None:
    total[device] = total.get(device, 0) + int(tensor.numel() * tensor.element_size())


def device_text(device: Any) -> str:
    """A device as "cuda:0", "cpu" or "meta"."""
    import torch

    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return f"{device.type}:0"
    return "cpu" if device.type == "cpu" else str(device)


def _is_on_disk(weights: Any, name: str) -> bool:
    # The weights map is not indexed: that would read the weight.
    name = getattr(weights, "prefix", "") + name
    return name in getattr(getattr(weights, "dataset", weights), "index", {})


def _linear_kind(module: Any) -> str | None:
    from torch import nn

    if isinstance(module, nn.Linear):
        bits = getattr(module, "num_bits", None)  # of a QAT checkpoint
        packed = module._parameters.get("weight_packed")  # of compressed-tensors
        kind = _weight_kind(module._parameters.get("weight", packed))
        return kind if bits is None else f"{bits}-bit"
    name = next(fused_experts({"": module}), None)  # ".gate_up_proj"
    return None if name is None else f"{_weight_kind(module._parameters[name[1:]])} experts"


def _weight_kind(weight: Any) -> str:
    quantized = {"Params4bit": "4-bit", "Int8Params": "8-bit"}.get(type(weight).__name__)
    dtype = str(getattr(weight, "dtype", "")).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return quantized or short.get(dtype, dtype)


def _adapter_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """The adapter tensors of a PEFT layer itself, each with its adapter's name."""
    import torch

    names = {*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())}
    if "modules_to_save" in module._modules:
        names.add("modules_to_save")
    elif not hasattr(module, "get_base_layer"):
        return
    for name in names:
        held: Any = getattr(module, name, None)
        for adapter, value in held.items() if hasattr(held, "items") else ():
            tensors = value.parameters() if isinstance(value, torch.nn.Module) else (value,)
            yield from ((adapter, tensor) for tensor in tensors if torch.is_tensor(tensor))
