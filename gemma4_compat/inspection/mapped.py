"""A model under a device map: the device and the size of each tensor."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.gate import installed_version
from ..errors import InputError
from ..model.device_maps import (
    OFFLOADED,
    closest,
    covering,
    device_label,
    device_order,
    left_out,
)
from ..model.files import LOCATIONS, located, read_config
from ..model.hub import Repository
from ..model.meta import QUANTS, bnb_config, meta_model, unquantized_folder
from ..model.parts import decoder_layers, is_under
from ..model.sizes import TensorSize, tensor_sizes

#: A BitsAndBytesConfig needs it for a map that names the CPU and a GPU: else transformers raises.
OFFLOAD_FLAG = "llm_int8_enable_fp32_cpu_offload"


@dataclass(frozen=True)
class UnknownKey:
    """An entry that names no module, parameter or buffer.

    ``closest`` is the module with the most similar name, ``closest_on`` the device that the map
    puts it on.  ``left_out``: the model class has such a part, but this checkpoint does
    not.  The patch ``device_map_keys`` warns of the other entries while loading.
    """

    key: str
    device: int | str
    closest: str | None
    closest_on: str | None
    left_out: bool


@dataclass(frozen=True)
class Placed:
    """The size of what an entry places, or of what is on a device: bytes by quantisation."""

    name: str
    device: str
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Source:
    """A folder or repository that describes a model without the quantisation of its weights.

    ``name`` is the model's name in reports.  If the user named a checkpoint, ``checkpoint`` is its
    folder or repository, and ``quantization`` the ``quantization_config`` in its ``config.json``.
    """

    name: str
    folder: Path | Repository
    checkpoint: Path | Repository | None = None
    quantization: Any = None


@contextlib.contextmanager
def source_of(model: Any) -> Iterator[Source]:
    """The source for a checkpoint's folder or Hub id, or for a transformers or PEFT model.

    Raises:
        InputError: the folder or repository does not exist, its ``config.json`` is missing or
            damaged, or ``model`` is neither a folder nor a transformers model.
    """
    if isinstance(model, LOCATIONS):
        name, folder = str(model), located(model)
        config = read_config(folder)
        if "quantization_config" not in config:
            yield Source(name, folder, folder)
            return
        with unquantized_folder(config, name) as plain:
            yield Source(name, plain, folder, config["quantization_config"])
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(getattr(base, "config", None), "to_json_string"):
        raise InputError(f"{type(model).__name__} is neither a folder nor a transformers model")
    name = type(base).__name__
    config = {**json.loads(base.config.to_json_string()), "architectures": [name]}
    with unquantized_folder(config, name) as plain:
        yield Source(name, plain)


class Mapped:
    """A model under a device map: what each entry places, and the device of every tensor.

    ``quantization_config`` and ``offload_folder`` are the arguments of ``from_pretrained``.
    """

    def __init__(
        self,
        source: Source,
        given: Mapping[str, int | str],
        quantization_config: Any = None,
        offload_folder: Any = None,
    ) -> None:
        folder, quants = source.folder, _quants()
        self.source, self.map, self.quants = source, given, quants
        self.quantization_config, self.offload_folder = quantization_config, offload_folder
        self.model = meta_model(folder)
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        #: names of parameters: the tied one to the one that it is tied to
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        #: names of the decoder layers, by number
        self.layers = decoder_layers(self.modules)
        devices = set(given.values())
        gpus = [device for device in given.values() if device not in OFFLOADED]
        #: the execution device of offloaded modules; their buffers stay on it
        self.main: int | str = min(gpus, key=device_order) if gpus else "cpu"
        self.offloads = {"cpu", "disk"} & devices if gpus else {"disk"} & devices
        #: transformers refuses a quantised model on such a map without the offload flag
        self.splits = bool({"cpu", "disk"} & devices) and devices != {"cpu"}
        #: entries that are not regular expressions; transformers needs that when it quantises
        self.no_patterns = [key for key in given if not _is_pattern(key)]
        patterns = {key: given[key] for key in given if key not in self.no_patterns}
        self.tensors: dict[str, tuple[TensorSize, ...]] = {}
        self.whole: dict[str, tuple[TensorSize, ...]] = {}
        #: by quantisation: linear layers that are not quantised because of the map
        self.kept: dict[str, list[str]] = {}
        #: quantisations under which no linear layer is quantised, on a map without a GPU
        self.lost: list[str] = []
        # With the flag, modules on the CPU are not quantised, on a map of the CPU alone too.
        flagged = not gpus and getattr(quantization_config, OFFLOAD_FLAG, False)
        for quant in quants:
            model = self.model
            if quant != "bf16":
                model = meta_model(folder, bnb_config(quant))
            self.whole[quant] = self.tensors[quant] = tensor_sizes(model)
            if (self.splits or flagged) and quant != "bf16":
                config = bnb_config(quant, offload=True)
                placed = meta_model(folder, config, patterns)
                self.tensors[quant] = tensor_sizes(placed)
                self.kept[quant] = sorted(_quantised(model) - _quantised(placed))
                if not gpus and self.kept[quant] and not _quantised(placed):
                    self.lost.append(quant)

    # -- names and devices

    def entry(self, name: str) -> str | None:
        """The entry that places a module or tensor: the longest one that covers it."""
        return covering(name, self.map)

    def rests_on(self, name: str) -> int | str:
        entry = self.entry(name)
        return "cpu" if entry is None else self.map[entry]

    def computes_on(self, name: str) -> int | str:
        device = self.rests_on(name)
        return self.main if device in self.offloads else device

    def is_offloaded(self, name: str) -> bool:
        entry = self.entry(name)
        return entry is not None and self.map[entry] in self.offloads

    def holds(self, tensor: TensorSize) -> int | str:
        """The device of a tensor after loading; accelerate does not offload buffers.

        Tied weights are one tensor, which is on a GPU if one of its names is.
        """
        if tensor.buffer:
            return self.computes_on(tensor.name)
        names = [tensor.name, *(t for t, source in self.tied.items() if source == tensor.name)]
        resident = [name for name in names if not self.is_offloaded(name)]
        return self.rests_on((resident or names)[0])

    def unknown(self) -> Iterator[UnknownKey]:
        known = {
            *self.modules,
            *(name for name, _ in self.model.named_parameters(remove_duplicate=False)),
            *(name for name, _ in self.model.named_buffers(remove_duplicate=False)),
        }
        for key, device in self.map.items():
            if key not in known:
                meant = closest(key, list(self.modules))
                meant_on = None if meant is None else device_label(self.rests_on(meant))
                yield UnknownKey(key, device, meant, meant_on, left_out(self.model, key))

    def uncovered(self) -> Iterator[str]:
        """The outermost modules without any covered tensor, and single uncovered tensors."""
        if "" in self.map:
            return
        bare = {t.name for t in self.whole["bf16"] if self.entry(t.name) is None}
        covered = [t.name for t in self.whole["bf16"] if t.name not in bare]
        seen: list[str] = []
        for name in [*self.modules, *bare]:
            if not name or is_under(name, seen):
                continue
            if any(is_under(other, [name]) for other in covered):
                continue
            if any(is_under(other, [name]) for other in bare):
                seen.append(name)
        yield from seen

    def entries(self) -> Iterator[Placed]:
        for key, device in self.map.items():
            placed = {
                quant: sum(t.bytes for t in tensors if self.entry(t.name) == key)
                for quant, tensors in self.tensors.items()
            }
            yield Placed(key, device_label(device), placed)

    def devices(self) -> Iterator[Placed]:
        totals: dict[int | str, dict[str, int]] = {}
        for quant, tensors in self.tensors.items():
            for tensor in tensors:
                device = self.holds(tensor)
                by_quant = totals.setdefault(device, dict.fromkeys(self.quants, 0))
                by_quant[quant] += tensor.bytes if device in OFFLOADED else tensor.on_cuda
        for device in sorted(totals, key=device_order):
            yield Placed(device_label(device), device_label(device), totals[device])

    def saves(self) -> dict[str, int]:
        """The saving against the same map with the main device in place of "cpu" and "disk"."""
        if self.main == "cpu":
            return dict.fromkeys(self.quants, 0)
        saved = {}
        for quant in self.quants:
            on_gpu = [t.on_cuda for t in self.tensors[quant] if self.holds(t) not in OFFLOADED]
            saved[quant] = sum(t.on_cuda for t in self.whole[quant]) - sum(on_gpu)
        return saved


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


def _quants() -> list[str]:
    """The quantisations to report; the sizes of quantised layers need bitsandbytes itself."""
    try:
        for name in ("bitsandbytes", "accelerate"):
            installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        return ["bf16"]
    return list(QUANTS)


def _quantised(model: Any) -> set[str]:
    kinds = ("Linear4bit", "Linear8bitLt")
    return {name for name, module in model.named_modules() if type(module).__name__ in kinds}
