"""Read a loaded model in one pass: where its tensors are stored, and where they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.hooks import offload_hook, placed_model
from ..model.parts import PARTS, fused_experts, is_under, part_of
from ..text import plural
from .mapped import OFFLOAD_FLAG
from .placement import (
    DISK,
    AdapterPlacement,
    Offloaded,
    PartPlacement,
    Problem,
    add,
    order,
    ordered,
)


@dataclass
class _Tensor:
    """A tensor of the model; tied tensors count as one."""

    name: str
    module: str
    tensor: Any
    rests_on: str  # where it is stored; "meta": nowhere
    computes_on: str
    offloaded: bool

    @property
    def bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())


class Loaded:
    """A loaded model, read in one pass; nothing is moved, loaded or changed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.of_adapters = {
            id(tensor): adapter
            for module in self.modules.values()
            for adapter, _, tensor in _adapter_tensors(module)
        }
        self.tensors = list(self._tensors())

    def _tensors(self) -> Iterator[_Tensor]:
        seen: set[Any] = set()
        for path, module in self.modules.items():
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    if tensor is None or _identity(tensor) in seen:
                        continue
                    placed, stored = self._placed(path, name, tensor)
                    if not {_identity(tensor), _identity(stored)} & seen:
                        yield placed
                    seen |= {_identity(tensor), _identity(stored)}

    def _placed(self, path: str, name: str, tensor: Any) -> tuple[_Tensor, Any]:
        """The placement of a tensor, and the tensor in memory that holds its values."""
        full = f"{path}.{name}" if path else name
        device = device_text(tensor.device)
        if device != "meta":
            return _Tensor(full, path, tensor, device, device, False), tensor
        for hooked, hook in self._hooks_over(path):
            key = full[len(hooked) + 1 :] if hooked else full
            place, stored = _storage(hook, key)
            if place is not None:
                computes_on = device_text(hook.execution_device)
                placed = _Tensor(full, path, tensor, place, computes_on, True)
                return placed, tensor if stored is None else stored
        return _Tensor(full, path, tensor, "meta", "meta", False), tensor

    def _hooks_over(self, path: str) -> Iterator[tuple[str, Any]]:
        """The offload hook of a module, then those of outer modules that place their submodules."""
        above: str | None = path
        while above is not None:
            hook = offload_hook(self.modules[above]) if above in self.modules else None
            if hook is not None and (above == path or getattr(hook, "place_submodules", False)):
                yield above, hook
            above = above.rpartition(".")[0] if above else None

    # -- the parts of an inspection

    def own(self) -> Iterator[_Tensor]:
        """The tensors of the base model."""
        return (each for each in self.tensors if id(each.tensor) not in self.of_adapters)

    def parts(self) -> Iterator[PartPlacement]:
        for name in PARTS:
            tensors = [each for each in self.own() if part_of(each.name) == name]
            if not tensors:
                continue
            weights: dict[str, int] = {}
            states: dict[str, int] = {}
            linear: dict[str, int] = {}
            for each in tensors:
                add(weights, each.rests_on, each.bytes)
                for state, place in self._quant_state(each):
                    add(states, place, state.numel() * state.element_size())
            for path in {each.module for each in tensors}:
                kind = _linear_kind(self.modules[path])
                if kind is not None:
                    add(linear, kind, 1)
            computing = {each.computes_on for each in tensors} - {"meta"}
            yield PartPlacement(
                name=name,
                linear=dict(sorted(linear.items())),
                weights=ordered(weights),
                quant_state=ordered(states),
                computes_on=tuple(sorted(computing, key=order)),
                offloaded=len({each.module for each in tensors if each.offloaded}),
            )

    def _quant_state(self, each: _Tensor) -> Iterator[tuple[Any, str]]:
        """The tensors that bitsandbytes keeps for a weight, each with the device that stores it."""
        for name, tensor in _quant_tensors(self.modules[each.module], each.tensor).items():
            place = device_text(tensor.device)
            if place == "meta" and name == "SCB":  # 8-bit: offloaded with the weight
                for hooked, hook in self._hooks_over(each.module):
                    key = f"{each.module}.SCB"[len(hooked) + 1 if hooked else 0 :]
                    place = _storage(hook, key)[0] or place
            yield tensor, place

    def offloaded(self) -> Iterator[Offloaded]:
        modules_by_devices: dict[tuple[str, str], set[str]] = {}
        for each in self.tensors:
            if each.offloaded:
                devices = (each.rests_on, each.computes_on)
                modules_by_devices.setdefault(devices, set()).add(each.module)
        for (rests_on, computes_on), modules in sorted(modules_by_devices.items()):
            yield Offloaded(len(modules), rests_on, computes_on)

    def adapters(self) -> Iterator[AdapterPlacement]:
        placed = {id(each.tensor): each for each in self.tensors}
        configs = getattr(self.model, "peft_config", None) or {}
        active = {name for module in self.modules.values() for name in _active(module)}
        computing: dict[str, set[str]] = {}  # devices by module, submodules included
        for each in self.own():
            path = each.module
            while path and each.rests_on != "meta":
                computing.setdefault(path, set()).add(each.computes_on)
                path = path.rpartition(".")[0]
        for adapter in configs:
            parts: dict[str, dict[str, int]] = {}
            on_meta, elsewhere = [], []
            for path, module in self.modules.items():
                for name, key, tensor in _adapter_tensors(module):
                    if name != adapter or id(tensor) not in placed:
                        continue
                    each, full = placed[id(tensor)], f"{path}.{key}"
                    add(parts.setdefault(part_of(path), {}), each.rests_on, each.bytes)
                    if each.rests_on == "meta":
                        on_meta.append(full)
                    elif each.computes_on not in computing.get(path, {each.computes_on}):
                        elsewhere.append(full)
            yield AdapterPlacement(
                name=adapter,
                kind=_kind(configs[adapter]),
                active=adapter in active,
                parts={name: ordered(parts[name]) for name in PARTS if name in parts},
                on_meta=tuple(on_meta),
                elsewhere=tuple(elsewhere),
            )

    # -- what is wrong

    def problems(self, adapters: Iterable[AdapterPlacement]) -> Iterator[Problem]:
        from .. import __name__ as package

        again = f"import {package} before the model is loaded, and load it again"
        damaged = tuple(
            _base_name(each.module)
            for each in self.own()
            if any(place == "meta" for _, place in self._quant_state(each))
        )
        if damaged:
            text = f"the quant state of {plural(len(damaged), 'quantised layer')} has no values"
            yield Problem(f"{text}: {again}", damaged, "quant_state_offload")
        lost = tuple(each.name for each in self.own() if each.rests_on == "meta")
        if lost:
            text = f"{plural(len(lost), 'tensor')} on meta, without a hook that onloads them"
            yield Problem(f"{text}: no weights were loaded", lost)
        for adapter in adapters:
            if adapter.on_meta:
                text = (
                    f"{plural(len(adapter.on_meta), 'tensor')} of the adapter {adapter.name!r} on "
                    f"meta, without values: {again}"
                )
                yield Problem(text, adapter.on_meta, "peft_redispatch")
            if adapter.elsewhere:
                text = (
                    f"{plural(len(adapter.elsewhere), 'tensor')} of the adapter {adapter.name!r} "
                    "on another device than the one that their layers compute on"
                )
                yield Problem(text, adapter.elsewhere, "peft_redispatch")
        for name, device, actual in self._undone():
            text = f'the device map has "{name}" on {device}, but it is on {actual}: {again}'
            yield Problem(text, (name,), "peft_redispatch")

    def not_quantised(self, asked: str | None) -> Iterator[Problem]:
        """A problem if 4 or 8 bit were requested, but no linear layer has them."""
        bits = (asked or "").partition(" ")[0]
        if bits not in ("4-bit", "8-bit"):
            return
        kinds = {path: _linear_kind(self.modules[path]) for path in {e.module for e in self.own()}}
        linear = tuple(sorted(_base_name(path) for path, kind in kinds.items() if kind is not None))
        if not linear or bits in kinds.values():
            return
        layers = plural(len(linear), "linear layer")
        text = f"{bits} was requested, but not one of {layers} is quantised"
        config = getattr(self.base.config, "quantization_config", None)
        options = config if isinstance(config, dict) else vars(config)
        if options.get(OFFLOAD_FLAG):
            text += (
                f": with {OFFLOAD_FLAG}=True transformers quantises nothing that the device map "
                "puts on the CPU or the disk. Load the model without that flag, or with a device "
                "map that uses a GPU"
            )
        yield Problem(text, linear)

    def _undone(self) -> Iterator[tuple[str, str, str]]:
        """Device map entries that PEFT's redispatch has undone: name, mapped and actual device."""
        base = mapped_model(self.model)
        if base is None:
            return
        given = {name: str(device) for name, device in base.hf_device_map.items()}
        gpus = [device for device in given.values() if device not in ("cpu", DISK)]
        own = {id(each.tensor): each for each in self.own()}
        placed = [
            (name, own[id(parameter)])
            for name, parameter in base.named_parameters()
            if id(parameter) in own
        ]
        for name, device in given.items():
            inner = [other for other in given if other != name and is_under(other, [name])]
            actual = sorted(
                each.rests_on
                for full, each in placed
                if (not name or is_under(full, [name])) and not is_under(full, inner)
            )
            if not name or not actual or (device == "cpu" and not gpus):
                continue
            wanted = {DISK, "meta"} if device == DISK else {"cpu", DISK, "meta"}
            if device in ("cpu", DISK) and not wanted & set(actual):
                yield name, device, actual[0]

    def notes(self) -> Iterator[str]:
        adapted = bool(getattr(self.model, "peft_config", None))
        if adapted and mapped_model(self.model) is not None:
            yield (
                "the base model's from_pretrained decides the placement; a device_map given to "
                "PEFT has no effect: adapters are placed where their layers compute"
            )


# -- reading a model ------------------------------------------------------------------------------


def mapped_model(model: Any) -> Any | None:
    """The model with the user's device map; PEFT's redispatch sets another map on the PeftModel."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base if vars(base).get("hf_device_map") is not None else placed_model(model)


def _identity(tensor: Any) -> Any:
    """A key that is equal for tied tensors, which may be several objects that share memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    try:
        return tensor.device, tensor.data_ptr(), tuple(tensor.shape)
    except RuntimeError:  # a tensor without storage: a fake tensor or a wrapper
        return id(tensor)


def device_text(device: Any) -> str:
    """A device as "cuda:0", "cpu" or "meta"."""
    import torch

    if isinstance(device, int):
        return f"cuda:{device}" if not hasattr(torch, "accelerator") else _accelerator(device)
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return f"{device.type}:0"
    return "cpu" if device.type == "cpu" else str(device)


def _accelerator(index: int) -> str:
    import torch

    current = torch.accelerator.current_accelerator()
    return f"{'cuda' if current is None else current.type}:{index}"


def _storage(hook: Any, name: str) -> tuple[str | None, Any]:
    """The device that stores a weight for a hook, and the weight if it is in memory.

    The device is "cpu" or "disk", or ``None`` if the hook has no such weight.  The weights map is
    not indexed: that would read the weight from disk.
    """
    weights = hook.weights_map
    key = getattr(weights, "prefix", "") + name
    weights = getattr(weights, "dataset", weights)
    in_memory = weights if isinstance(weights, dict) else getattr(weights, "state_dict", {})
    if key in in_memory:
        return device_text(in_memory[key].device), in_memory[key]
    if key in getattr(weights, "index", {}):
        return DISK, None
    return None, None


def _quant_tensors(module: Any, weight: Any) -> dict[str, Any]:
    """The tensors of a weight's quant state (4-bit), or its scales (8-bit)."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        tensors = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
        inner = getattr(state, "state2", None)
        if inner is not None:
            tensors |= {"state2.absmax": inner.absmax, "state2.code": inner.code}
    else:
        scales = getattr(weight, "SCB", None)
        if scales is None and type(weight).__name__ == "Int8Params":
            scales = getattr(getattr(module, "state", None), "SCB", None)
        tensors = {"SCB": scales}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _linear_kind(module: Any) -> str | None:
    from torch import nn

    if isinstance(module, nn.Linear):
        return _weight_kind(module._parameters.get("weight"))
    name = next(fused_experts({"": module}), None)  # ".gate_up_proj"
    return None if name is None else f"{_weight_kind(module._parameters[name[1:]])} experts"


def _weight_kind(weight: Any) -> str:
    quantised = {"Params4bit": "4-bit", "Int8Params": "8-bit"}.get(type(weight).__name__)
    dtype = str(getattr(weight, "dtype", "")).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return quantised or short.get(dtype, dtype)


def _adapter_tensors(module: Any) -> Iterator[tuple[str, str, Any]]:
    """The adapter tensors of a PEFT layer itself: adapter, name, tensor."""
    import torch

    names = [*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())]
    if "modules_to_save" in getattr(module, "_modules", {}):
        names.append("modules_to_save")
    if not hasattr(module, "get_base_layer") and "modules_to_save" not in names:
        return
    for name in dict.fromkeys(names):
        held: Any = getattr(module, name, None)
        if not hasattr(held, "items"):
            continue
        for adapter, value in held.items():
            if isinstance(value, torch.nn.Module):
                for inner, parameter in value.named_parameters():
                    yield adapter, f"{name}.{adapter}.{inner}", parameter
            elif torch.is_tensor(value):
                yield adapter, f"{name}.{adapter}", value


def _active(module: Any) -> Sequence[str]:
    if not hasattr(module, "get_base_layer"):
        return ()
    active = getattr(module, "active_adapters", ())
    return () if callable(active) or getattr(module, "disable_adapters", False) else active


def _kind(config: Any) -> str:
    kind = getattr(config, "peft_type", "")
    return str(getattr(kind, "value", kind))


def _base_name(path: str) -> str:
    return path.removesuffix(".base_layer")
