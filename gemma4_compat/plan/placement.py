"""Distributes the modules of a model over GPUs and the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model import parts
from ..model.device_maps import covering
from ..model.sizes import TensorSize
from .demand import Demand, Job
from .gpus import Gpu

#: Offloaded layers are copied to the GPU while earlier ones compute: so many are on it at once.
_STREAMED_LAYERS = 3


@dataclass
class Unit:
    """Modules that are placed together: a part of the model, one decoder layer, or the rest.

    The rest has no modules, and stays on GPU 0.  ``weights`` are the bytes on a GPU, ``buffers``
    are on a GPU always, ``onloaded`` and ``largest`` are the bytes of all weights, and of the
    largest one, while an offloaded unit computes.
    """

    part: str
    modules: tuple[str, ...] = ()
    layer: int | None = None
    weights: int = 0
    buffers: int = 0
    adapter: int = 0
    onloaded: int = 0
    largest: int = 0


@dataclass
class Placement:
    """Where each unit is: the index of a GPU, or "cpu".  Units that are not in it are on GPU 0."""

    units: Sequence[Unit]
    gpus: Sequence[Gpu]
    job: Job
    devices: dict[int, int | str] = field(default_factory=dict)

    def device(self, unit: int) -> int | str:
        return self.devices.get(unit, 0)

    def cpu(self) -> int:
        """The bytes of offloaded weights, if all of them are quantised."""
        on_cpu = (index for index, device in self.devices.items() if device == "cpu")
        return sum(self.units[index].weights for index in on_cpu)

    def device_map(self) -> dict[str, int | str]:
        """The device map, with GPU 0 before other GPUs: accelerate's main device is the first."""
        placed = [(name, d) for i, d in self.devices.items() for name in self.units[i].modules]
        on_cpu = {name: device for name, device in placed if device == "cpu"}
        return {**on_cpu, "": 0, **{name: device for name, device in placed if device != "cpu"}}

    def cache(self, demand: Demand, gpu: int) -> int:
        """The KV cache on a GPU; offloaded layers have theirs on GPU 0."""
        return sum(
            demand.cache.get(unit.layer, 0)
            for index, unit in enumerate(self.units)
            if unit.layer is not None and self._computes_on(index) == gpu
        )

    def activations(self, demand: Demand, gpu: int) -> int:
        """Activations on a GPU, with the weights that are copied to it for a forward."""
        if not self.has_layers(gpu):
            return 0
        return demand.activations + (self._streamed() if gpu == 0 else 0)

    def adapter(self, gpu: int) -> int:
        return sum(u.adapter for i, u in enumerate(self.units) if self._computes_on(i) == gpu)

    def weights(self, gpu: int) -> int:
        return sum(
            unit.buffers + (unit.weights if self.device(index) == gpu else 0)
            for index, unit in enumerate(self.units)
            if self._computes_on(index) == gpu
        )

    def is_used(self, gpu: int) -> bool:
        return gpu == 0 or gpu in self.devices.values()

    def has_layers(self, gpu: int) -> bool:
        on_gpu = (i for i in range(len(self.units)) if self._computes_on(i) == gpu)
        return gpu == 0 or any(self.units[index].layer is not None for index in on_gpu)

    def needed(self, demand: Demand, gpu: int) -> int:
        """All the memory that a GPU needs."""
        if not self.is_used(gpu):
            return 0
        adapter = self.adapter(gpu) * (1 + self.job.states)
        besides = self.cache(demand, gpu) + self.activations(demand, gpu)
        return self.weights(gpu) + adapter + besides + self.gpus[gpu].outside

    def fits(self, demand: Demand) -> bool:
        return all(self.needed(demand, number) <= gpu.free for number, gpu in enumerate(self.gpus))

    def _computes_on(self, unit: int) -> int:
        device = self.device(unit)
        return device if isinstance(device, int) else 0

    def _streamed(self) -> int:
        """The GPU memory of offloaded weights during a forward: three layers, or one tensor."""
        on_cpu = [self.units[i] for i, device in self.devices.items() if device == "cpu"]
        layers = sorted(unit.onloaded for unit in on_cpu if unit.layer is not None)
        others = [u.largest for u in on_cpu if u.layer is None and u.part != parts.PLE]
        return max(sum(layers[-_STREAMED_LAYERS:]), max(others, default=0))


def place(placement: Placement, demand: Demand, *, keep_ple: bool = False) -> Placement:
    """Offload the least that makes room for ``demand``, as far as that is possible.

    Per-layer embeddings go to the CPU in any case, unless ``keep_ple`` is true.  Then vision, audio
    and the decoder layers from the last one on are moved away from GPU 0: to the first other GPU
    that has room, else to the CPU.
    """
    steps = [i for i, unit in enumerate(placement.units) if unit.modules]
    embeddings = [i for i in steps if placement.units[i].part == parts.PLE]
    if not keep_ple:
        placement.devices.update(dict.fromkeys(embeddings, "cpu"))
    first = 1  # Layers that follow each other stay together.
    for index in steps:
        if placement.fits(demand):
            break
        if index in placement.devices:
            continue
        is_layer = placement.units[index].layer is not None
        device = _move(placement, index, demand, first if is_layer else 1)
        if is_layer:
            first = device if isinstance(device, int) else len(placement.gpus)
    return placement


def _move(placement: Placement, unit: int, demand: Demand, first: int) -> int | str:
    """Move a unit to the first GPU from ``first`` on that has room, else to the CPU."""
    for gpu in range(first, len(placement.gpus)):
        placement.devices[unit] = gpu
        if placement.needed(demand, gpu) <= placement.gpus[gpu].free:
            return gpu
    placement.devices[unit] = "cpu"
    return "cpu"


def units_of(
    model: Any,
    whole: Iterable[TensorSize],
    onloaded: Mapping[str, int],
    adapter: Iterable[TensorSize],
) -> list[Unit]:
    """The units of a model, in the order in which they are offloaded; the rest is the last one."""
    units = [*_steps(model), Unit(parts.REST)]
    owners = {module: unit for unit in units for module in unit.modules}
    owners[""] = units[-1]

    def owner(name: str) -> Unit:
        return owners[covering(name, owners) or ""]

    for tensor in whole:
        if tensor.buffer:
            owner(tensor.name).buffers += tensor.on_cuda
        else:
            owner(tensor.name).weights += tensor.on_cuda
    for name, taken in onloaded.items():
        unit = owner(name)
        unit.onloaded += taken
        unit.largest = max(unit.largest, taken)
    for tensor in adapter:
        owner(tensor.name.removeprefix("base_model.model.")).adapter += tensor.on_cuda
    return units


def _steps(model: Any) -> Iterator[Unit]:
    tops: dict[str, list[str]] = {parts.PLE: [], parts.VISION: [], parts.AUDIO: []}
    layers = []
    for name, module in model.named_modules():
        part = parts.part_of(name)
        if part in tops and not parts.is_under(name, tops[part]):
            if next(module.parameters(), None) is not None:
                tops[part].append(name)
        elif part == parts.LAYERS and re.search(r"(^|\.)layers\.\d+$", name):
            layers.append(name)
    yield from (Unit(part, tuple(names)) for part, names in tops.items() if names)
    # From the last one on.  In models that share keys and values the last layers are the largest.
    # And transformers < 5.23 treats layers.3 as a pattern that also matches layers.30: in this
    # order layers.30 to layers.39 are always offloaded before layers.3.
    for name in reversed(layers):
        yield Unit(parts.LAYERS, (name,), int(name.rpartition(".")[2]))
