"""Where the parts of a loaded model are, and what of it is damaged."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import sizes
from ..patches._offload import _holder, offload_hook
from ..placement import input_device
from ._text import plural, size, table, wrap

DISK = "disk"
#: in the order of tables
PARTS = (
    sizes.LAYERS, sizes.PLE, sizes.EMBEDDINGS, sizes.VISION, sizes.AUDIO, sizes.REST,
)  # fmt: skip
_MOST_NAMES = 3


@dataclass(frozen=True)
class PartPlacement:
    """A part of the model; devices as "cuda:0", "cpu" or "disk".

    ``linear`` counts its linear layers by "4-bit", "8-bit", "bf16"..., ``weights`` and
    ``quant_state`` are bytes by the device that they rest on.  ``computes_on`` is where accelerate
    brings what rests elsewhere, ``offloaded`` counts such modules.
    """

    name: str
    linear: Mapping[str, int]
    weights: Mapping[str, int]
    quant_state: Mapping[str, int]
    computes_on: tuple[str, ...]
    offloaded: int


@dataclass(frozen=True)
class Offloaded:
    """So many modules whose weights rest in one place and are brought to a device to compute."""

    modules: int
    rests_on: str
    computes_on: str


@dataclass(frozen=True)
class AdapterPlacement:
    """An adapter: bytes by part of the model and device.

    ``on_meta`` are its tensors without values, ``elsewhere`` those that are on another device than
    the one their layer computes on.
    """

    name: str
    kind: str
    active: bool
    parts: Mapping[str, Mapping[str, int]]
    on_meta: tuple[str, ...]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Something that does not work, the modules that it is about, and the patch that is for it."""

    text: str
    modules: tuple[str, ...]
    patch: str | None = None


@dataclass(frozen=True)
class ModelInspection:
    """What `inspect_model` found."""

    model: str
    base: str
    quantisation: str | None
    device_map: Mapping[str, str] | None
    input_device: str | None
    parts: tuple[PartPlacement, ...]
    offloaded: tuple[Offloaded, ...]
    adapters: tuple[AdapterPlacement, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing is damaged, and all of it is where it should be."""
        return not self.problems

    @property
    def bytes(self) -> dict[str, int]:
        """All of it, by device: weights, quant states and adapters."""
        total: dict[str, int] = {}
        for part in self.parts:
            for by_device in (part.weights, part.quant_state):
                _add_all(total, by_device)
        for adapter in self.adapters:
            for by_device in adapter.parts.values():
                _add_all(total, by_device)
        return dict(sorted(total.items(), key=lambda item: _order(item[0])))

    def as_dict(self) -> dict[str, Any]:
        """The same for programs: plain values."""
        return {**asdict(self), "bytes": self.bytes, "ok": self.ok}

    def __str__(self) -> str:
        lines = [*_title(self)]
        for head, rows, right in _tables(self):
            lines += ["", table(rows, head, right=right)]
        told = [wrap(text, " " * 9, f"{kind:<9}") for kind, text in _told(self)]
        return "\n".join([*lines, "", *told])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "\n".join(_html(self))


def inspect_model(model: Any) -> ModelInspection:
    """Say where the parts of a loaded model are; nothing is moved, loaded or changed.

    Works for plain models and ``PeftModel``, whole or split over devices, quantised or not.
    Damaged is what has lost its values: 4-bit layers whose quant state is on meta, and tensors of
    the model or of an adapter that are on meta with nothing to bring them in.

    The placement is that of the base model's ``from_pretrained``.  A ``device_map`` given to
    ``PeftModel.from_pretrained`` is ignored, as an adapter has no placement of its own: its tensors
    go where the layers that they adapt compute.

    Args:
        model: a ``torch.nn.Module``, also inside of ``torch.compile`` or ``DataParallel``; one
            made by transformers where input device, device map and adapters are to be known.

    Raises:
        TypeError: ``model`` is none.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect_model wants a model, not {type(model).__name__}")
    model = _unwrapped(model)
    look = _Look(model)
    base = look.base
    adapters = tuple(look.adapters())
    return ModelInspection(
        model=type(model).__name__,
        base=type(base).__name__,
        quantisation=_quantisation(base),
        device_map=_device_map(model),
        input_device=_input_device(model),
        parts=tuple(look.parts()),
        offloaded=tuple(look.offloaded()),
        adapters=adapters,
        problems=tuple(look.problems(adapters)),
        notes=tuple(look.notes()),
    )


@dataclass
class _Tensor:
    """A tensor of the model, once, however often it is tied."""

    name: str
    module: str
    tensor: Any
    rests_on: str  # "meta": nowhere
    computes_on: str
    offloaded: bool

    @property
    def bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())


class _Look:
    """One pass over the model."""

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
                    placed, resting = self._placed(path, name, tensor)
                    if not {_identity(tensor), _identity(resting)} & seen:
                        yield placed
                    seen |= {_identity(tensor), _identity(resting)}

    def _placed(self, path: str, name: str, tensor: Any) -> tuple[_Tensor, Any]:
        """Where a tensor is, and the one that rests in its place where that is in memory."""
        full = f"{path}.{name}" if path else name
        device = _text(tensor.device)
        if device != "meta":
            return _Tensor(full, path, tensor, device, device, False), tensor
        for hooked, hook in self._hooks_over(path):
            key = full[len(hooked) + 1 :] if hooked else full
            place, resting = _resting_place(hook, key)
            if place is not None:
                computes_on = _text(hook.execution_device)
                placed = _Tensor(full, path, tensor, place, computes_on, True)
                return placed, tensor if resting is None else resting
        return _Tensor(full, path, tensor, "meta", "meta", False), tensor

    def _hooks_over(self, path: str) -> Iterator[tuple[str, Any]]:
        """The offload hook of a module, and those around it that place what is inside of them."""
        above: str | None = path
        while above is not None:
            hook = offload_hook(self.modules[above]) if above in self.modules else None
            if hook is not None and (above == path or getattr(hook, "place_submodules", False)):
                yield above, hook
            above = above.rpartition(".")[0] if above else None

    # -- what is asked

    def own(self) -> Iterator[_Tensor]:
        """Those of the base model."""
        return (each for each in self.tensors if id(each.tensor) not in self.of_adapters)

    def parts(self) -> Iterator[PartPlacement]:
        for name in PARTS:
            tensors = [each for each in self.own() if sizes.part_of(each.name) == name]
            if not tensors:
                continue
            weights: dict[str, int] = {}
            states: dict[str, int] = {}
            linear: dict[str, int] = {}
            for each in tensors:
                _add(weights, each.rests_on, each.bytes)
                for state, place in self._quant_state(each):
                    _add(states, place, state.numel() * state.element_size())
            for path in {each.module for each in tensors}:
                kind = _linear_kind(self.modules[path])
                if kind is not None:
                    _add(linear, kind, 1)
            computing = {each.computes_on for each in tensors} - {"meta"}
            yield PartPlacement(
                name=name,
                linear=dict(sorted(linear.items())),
                weights=_sorted(weights),
                quant_state=_sorted(states),
                computes_on=tuple(sorted(computing, key=_order)),
                offloaded=len({each.module for each in tensors if each.offloaded}),
            )

    def _quant_state(self, each: _Tensor) -> Iterator[tuple[Any, str]]:
        """What bitsandbytes keeps beside a weight, and where that rests."""
        for name, tensor in _quant_tensors(self.modules[each.module], each.tensor).items():
            place = _text(tensor.device)
            if place == "meta" and name == "SCB":  # 8-bit: offloaded with the weight
                for hooked, hook in self._hooks_over(each.module):
                    key = f"{each.module}.SCB"[len(hooked) + 1 if hooked else 0 :]
                    place = _resting_place(hook, key)[0] or place
            yield tensor, place

    def offloaded(self) -> Iterator[Offloaded]:
        found: dict[tuple[str, str], set[str]] = {}
        for each in self.tensors:
            if each.offloaded:
                found.setdefault((each.rests_on, each.computes_on), set()).add(each.module)
        for (rests_on, computes_on), modules in sorted(found.items()):
            yield Offloaded(len(modules), rests_on, computes_on)

    def adapters(self) -> Iterator[AdapterPlacement]:
        placed = {id(each.tensor): each for each in self.tensors}
        configs = getattr(self.model, "peft_config", None) or {}
        active = {name for module in self.modules.values() for name in _active(module)}
        computing: dict[str, set[str]] = {}  # by each module, with all inside
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
                    _add(parts.setdefault(sizes.part_of(path), {}), each.rests_on, each.bytes)
                    if each.rests_on == "meta":
                        on_meta.append(full)
                    elif each.computes_on not in computing.get(path, {each.computes_on}):
                        elsewhere.append(full)
            yield AdapterPlacement(
                name=adapter,
                kind=_kind(configs[adapter]),
                active=adapter in active,
                parts={name: _sorted(parts[name]) for name in PARTS if name in parts},
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
            text = f"{plural(len(lost), 'tensor')} on meta, and no hook brings them in"
            yield Problem(f"{text}: no weights were loaded for them", lost)
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
                    "on another device than their layers compute on"
                )
                yield Problem(text, adapter.elsewhere, "peft_redispatch")
        for name, device, there in self._undone():
            text = f'the device map has "{name}" on {device}, but it is on {there}: {again}'
            yield Problem(text, (name,), "peft_redispatch")

    def _undone(self) -> Iterator[tuple[str, str, str]]:
        """Entries of the device map that no longer hold: PEFT's redispatch leaves such."""
        base = _placed_model(self.model)
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
            inner = [other for other in given if other != name and sizes.is_under(other, [name])]
            there = sorted(
                each.rests_on
                for full, each in placed
                if (not name or sizes.is_under(full, [name])) and not sizes.is_under(full, inner)
            )
            if not name or not there or (device == "cpu" and not gpus):
                continue
            wanted = {DISK, "meta"} if device == DISK else {"cpu", DISK, "meta"}
            if device in ("cpu", DISK) and not wanted & set(there):
                yield name, device, there[0]

    def notes(self) -> Iterator[str]:
        adapted = bool(getattr(self.model, "peft_config", None))
        if adapted and _placed_model(self.model) is not None:
            yield (
                "placement is that of the base model's from_pretrained; a device_map given to "
                "PEFT is ignored, as adapters go where their layers compute"
            )


# -- reading a model ------------------------------------------------------------------------------


def _unwrapped(model: Any) -> Any:
    """The model inside of ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    inside = {
        "OptimizedModule": "_orig_mod",
        "DataParallel": "module",
        "DistributedDataParallel": "module",
    }
    while type(model).__name__ in inside:
        model = getattr(model, inside[type(model).__name__])
    return model


def _identity(tensor: Any) -> Any:
    """Equal for tied tensors, which may be several objects on one memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    try:
        return tensor.device, tensor.data_ptr(), tuple(tensor.shape)
    except RuntimeError:  # tensors without storage: fake ones, wrappers
        return id(tensor)


def _text(device: Any) -> str:
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


def _resting_place(hook: Any, name: str) -> tuple[str | None, Any]:
    """Where the weight lies that a hook brings in, "cpu" or "disk"; ``None``: it has none.

    Only names and tensors in memory are looked at; asking the map for the value would read it.
    """
    weights = hook.weights_map
    key = getattr(weights, "prefix", "") + name
    weights = getattr(weights, "dataset", weights)
    in_memory = weights if isinstance(weights, dict) else getattr(weights, "state_dict", {})
    if key in in_memory:
        return _text(in_memory[key].device), in_memory[key]
    if key in getattr(weights, "index", {}):
        return DISK, None
    return None, None


def _quant_tensors(module: Any, weight: Any) -> dict[str, Any]:
    """The tensors of a weight's quant state (4-bit), or its scales (8-bit)."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        found = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
        inner = getattr(state, "state2", None)
        if inner is not None:
            found |= {"state2.absmax": inner.absmax, "state2.code": inner.code}
    else:
        scales = getattr(weight, "SCB", None)
        if scales is None and type(weight).__name__ == "Int8Params":
            scales = getattr(getattr(module, "state", None), "SCB", None)
        found = {"SCB": scales}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _linear_kind(module: Any) -> str | None:
    from torch import nn

    if not isinstance(module, nn.Linear):
        return None
    weight = module._parameters.get("weight")
    quantised = {"Params4bit": "4-bit", "Int8Params": "8-bit"}.get(type(weight).__name__)
    dtype = str(getattr(weight, "dtype", "")).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return quantised or short.get(dtype, dtype)


def _adapter_tensors(module: Any) -> Iterator[tuple[str, str, Any]]:
    """What a PEFT layer holds itself: adapter, name, tensor."""
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


def _quantisation(base: Any) -> str | None:
    config = getattr(getattr(base, "config", None), "quantization_config", None)
    if config is None:
        return None
    told = config if isinstance(config, dict) else config.to_dict()
    if told.get("load_in_4bit") or told.get("_load_in_4bit"):
        nested = ", double quantisation" if told.get("bnb_4bit_use_double_quant") else ""
        return f"4-bit ({told.get('bnb_4bit_quant_type')}{nested})"
    if told.get("load_in_8bit") or told.get("_load_in_8bit"):
        return "8-bit"
    method = told.get("quant_method")
    return str(getattr(method, "value", method))


def _placed_model(model: Any) -> Any | None:
    """What holds the user's device map: PEFT's redispatch leaves another one on its own model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base if vars(base).get("hf_device_map") is not None else _holder(model)


def _device_map(model: Any) -> dict[str, str] | None:
    base = _placed_model(model)
    return None if base is None else {name: str(d) for name, d in base.hf_device_map.items()}


def _input_device(model: Any) -> str | None:
    try:
        return _text(input_device(model))
    except (TypeError, ValueError, AttributeError):
        return None


def _add(total: dict[str, int], key: str, number: int) -> None:
    total[key] = total.get(key, 0) + number


def _add_all(total: dict[str, int], numbers: Mapping[str, int]) -> None:
    for key, number in numbers.items():
        _add(total, key, number)


def _sorted(numbers: Mapping[str, int]) -> dict[str, int]:
    return {key: numbers[key] for key in sorted(numbers, key=_order)}


def _order(device: str) -> tuple[int, str]:
    """Devices that compute, the CPU, the disk."""
    last = ("cpu", DISK, "meta")
    return (last.index(device) + 1 if device in last else 0), device


# -- what is printed ------------------------------------------------------------------------------


def _title(found: ModelInspection) -> Iterator[str]:
    name = found.base if found.model == found.base else f"{found.base} in {found.model}"
    yield name
    yield found.quantisation or "not quantised"
    if found.input_device is not None:
        yield f"inputs go to {found.input_device}"


_Table = tuple[list[str], list[list[str]], tuple[int, ...]]


def _tables(found: ModelInspection) -> Iterator[_Table]:
    rows = []
    for part in found.parts:
        first = [
            part.name,
            ", ".join(f"{number} {kind}" for kind, number in part.linear.items()),
            ", ".join(part.computes_on),
        ]
        for device in sorted({*part.weights, *part.quant_state}, key=_order):
            state = part.quant_state.get(device)
            weights = size(part.weights.get(device, 0))
            rows.append([*first, _place(device), weights, "" if state is None else size(state)])
            first = ["", "", ""]
    total = "all"
    for device, number in found.bytes.items():
        rows.append([total, "", "", _place(device), size(number), ""])
        total = ""
    head = ["part", "linear layers", "computes", "rests on", "weights", "quant"]
    yield head, rows, (4, 5)
    rows = []
    for adapter in found.adapters:
        label = f"{adapter.name} ({adapter.kind}{'' if adapter.active else ', not active'})"
        for part_name, by_device in adapter.parts.items():
            for device, number in by_device.items():
                rows.append([label, part_name, _place(device), size(number)])
                label = ""
    if rows:
        yield ["adapter", "part", "rests on", "weights"], rows, (3,)


def _place(device: str) -> str:
    return "lost" if device == "meta" else device


def _told(found: ModelInspection) -> Iterator[tuple[str, str]]:
    for problem in found.problems:
        names = _some(problem.modules)
        patch = f" [{problem.patch}]" if problem.patch else ""
        yield "problem", f"{problem.text}{patch}: {names}"
    for each in found.offloaded:
        what = plural(each.modules, "module")
        where = f"{each.rests_on}, and computing on {each.computes_on}"
        yield "offload", f"{what} resting on {where} (accelerate's hooks)"
    for note in found.notes:
        yield "note", note
    if found.ok:
        yield "fine", "nothing is damaged, all of it is where it should be"


def _some(names: Iterable[str]) -> str:
    names = [name.removeprefix("base_model.model.") for name in names]  # PEFT's
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _html(found: ModelInspection) -> Iterator[str]:
    yield f"<p><b>{'<br>'.join(map(html.escape, _title(found)))}</b></p>"
    for head, rows, right in _tables(found):
        yield "<table><thead><tr>"
        yield "".join(_cell("th", cell, number in right) for number, cell in enumerate(head))
        yield "</tr></thead><tbody>"
        for row in rows:
            cells = (_cell("td", cell, number in right) for number, cell in enumerate(row))
            yield f"<tr>{''.join(cells)}</tr>"
        yield "</tbody></table>"
    yield "<ul>"
    for kind, text in _told(found):
        yield f"<li><b>{html.escape(kind)}</b> {html.escape(text)}</li>"
    yield "</ul>"


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} style="text-align: {"right" if right else "left"}">{html.escape(text)}</{tag}>'
