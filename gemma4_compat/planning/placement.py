"""Distributes the modules of a model over GPUs and the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model import parts
from ..model.device_maps import covering
from ..model.sizes import TensorSize
from .demand import Demand, Job
from .gpus import Gpu

#: Offloaded layers are copied to the GPU while earlier ones compute: so many are on it at once.  In
#: training, one is, and two whose keys and values a checkpoint keeps until the end of the backward.
#: Experts in 4 bits are not copied ahead.
_STREAMED_LAYERS = 3
#: Several GPUs are filled so evenly, in bytes.
_EVEN = 32 * 2**20


@dataclass
class Unit:
    """Modules that are placed together: a part of the model, one decoder layer, or the rest.

    The rest has no modules, and stays on GPU 0.  ``weights`` are the bytes on a GPU, ``buffers``
    are on a GPU always, ``onloaded`` and ``largest`` are the bytes of all weights, and of the
    largest one, while an offloaded unit computes; ``experts`` are those of experts in 4
    bits, which ``onloaded`` leaves out.  ``device`` is the index of a GPU, or "cpu".
    """

    part: str
    modules: tuple[str, ...] = ()
    layer: int | None = None
    weights: int = 0
    buffers: int = 0
    adapter: int = 0
    onloaded: int = 0
    experts: int = 0
    largest: int = 0
    device: int | str = 0

    @property
    def gpu(self) -> int:
        """The GPU on which the unit computes; an offloaded one computes on GPU 0."""
        return self.device if isinstance(self.device, int) else 0


@dataclass
class Placement:
    """The units of a model on these GPUs, and the memory that a job needs there.

    ``spare`` bytes of each GPU are to stay free.
    """

    units: Sequence[Unit]
    gpus: Sequence[Gpu]
    job: Job
    spare: int = 0

    def on(self, gpu: int) -> list[Unit]:
        """The units that compute on a GPU."""
        return [unit for unit in self.units if unit.gpu == gpu]

    def offloaded(self) -> list[Unit]:
        return [unit for unit in self.units if unit.device == "cpu"]

    def cpu(self) -> int:
        """The bytes of offloaded weights, if all of them are quantized."""
        return sum(unit.weights for unit in self.offloaded())

    def device_map(self) -> dict[str, int | str]:
        """The device map, with GPU 0 before other GPUs: accelerate's main device is the first."""
        on_cpu = {name: unit.device for unit in self.offloaded() for name in unit.modules}
        others = {name: unit.device for unit in self.units if unit.gpu for name in unit.modules}
        return {**on_cpu, "": 0, **others}

    def cache(self, demand: Demand, gpu: int) -> int:
        """The KV cache on a GPU; offloaded layers have theirs on GPU 0."""
        layers = (unit.layer for unit in self.on(gpu) if unit.layer is not None)
        return sum(demand.cache.get(layer, 0) for layer in layers)

    def activations(self, demand: Demand, gpu: int) -> int:
        """Activations on a GPU, with the weights that are copied to it for a forward."""
        if gpu == 0:
            return demand.activations + self._streamed()
        return demand.activations if any(u.layer is not None for u in self.on(gpu)) else 0

    def adapter(self, gpu: int) -> int:
        return sum(unit.adapter for unit in self.on(gpu))

    def weights(self, gpu: int) -> int:
        return sum(u.buffers + (u.weights if u.device == gpu else 0) for u in self.on(gpu))

    def needed(self, demand: Demand, gpu: int) -> int:
        """All the memory that a GPU needs."""
        if not self.on(gpu):
            return 0
        adapter = (1 + self.job.states) * self.adapter(gpu)
        besides = self.cache(demand, gpu) + self.activations(demand, gpu)
        besides += self.unused(demand, gpu) + self.gpus[gpu].outside
        return self.weights(gpu) + adapter + besides

    def unused(self, demand: Demand, gpu: int) -> int:
        """The memory that PyTorch reserves on a GPU in pieces into which no tensor fits.

        Training failed with 0.42 to 0.51 GiB of it, and with LoRA on experts, whose dequantized
        weights take 0.95 GiB each, with 0.72.  Generating failed with 0.38 where a mask takes 0.44
        GiB, with 0.74 where it takes 0.98, and with 0.46 where a dequantized weight takes 0.22.
        Where decoder layers are offloaded, it failed with 0.33 where such a weight takes 0.11, and
        with 0.59 where it takes 0.22: a copied layer may take a part of a block.
        """
        if self.job.states:
            return 2**29 + 2**28 * any(".experts." in tensor.name for tensor in self.job.adapter)
        least = max(2**28 + 5 * demand.largest // 8, 3 * self.job.dequantized)
        if gpu == 0 and any(unit.layer is not None for unit in self.offloaded()):
            return max(least, 7 * 2**26, 4 * self.job.dequantized)
        return least

    def fits(self, demand: Demand) -> bool:
        return all(self.fits_on(demand, gpu) for gpu in range(len(self.gpus)))

    def fits_on(self, demand: Demand, gpu: int) -> bool:
        return self.needed(demand, gpu) + self.spare <= self.gpus[gpu].free

    def _streamed(self) -> int:
        """The GPU memory of offloaded weights during a forward: some layers, or one tensor."""
        on_cpu = self.offloaded()
        layers = sorted(unit.onloaded for unit in on_cpu if unit.layer is not None)
        others = [u.largest for u in on_cpu if u.layer is None and u.part != parts.PLE]
        experts = max((unit.experts for unit in on_cpu), default=0)
        return max(sum(layers[-_STREAMED_LAYERS:]) + experts, max(others, default=0))


def place(placement: Placement, demand: Demand, *, keep_ple: bool = False) -> Placement:
    """Offload the least that makes room for ``demand``, as far as that is possible.

    Per-layer embeddings go to the CPU in any case, unless ``keep_ple`` is true.  Then vision, audio
    and the decoder layers from the last one on are moved away from GPU 0: to the first other GPU
    that has room, else to the CPU.  If several GPUs are needed, as much is left free on each.
    """
    _fill_gpus(placement, demand, keep_ple)
    if placement.fits(demand) and any(unit.gpu for unit in placement.units):
        offloaded = placement.offloaded()
        low, high = 0, max(gpu.free for gpu in placement.gpus)
        while high - low > _EVEN:
            placement.spare = (low + high) // 2
            _fill_gpus(placement, demand, keep_ple)
            if placement.fits(demand) and placement.offloaded() == offloaded:
                low = placement.spare
            else:
                high = placement.spare
        placement.spare = low
        _fill_gpus(placement, demand, keep_ple)
        placement.spare = 0
    return placement


def _fill_gpus(placement: Placement, demand: Demand, keep_ple: bool) -> None:
    for unit in placement.units:
        unit.device = 0
    first = 1  # Layers that follow each other stay together.
    for unit in (unit for unit in placement.units if unit.modules):
        if unit.part == parts.PLE and not keep_ple:
            unit.device = "cpu"
        elif placement.fits(demand):
            break
        elif unit.layer is None:
            _move(placement, unit, demand, 1)
        else:
            _move(placement, unit, demand, first)
            first = unit.gpu or len(placement.gpus)


def _move(placement: Placement, unit: Unit, demand: Demand, first: int) -> None:
    """Move a unit to the first GPU with room, starting at ``first``; to the CPU if none has."""
    for gpu in range(first, len(placement.gpus)):
        unit.device = gpu
        if placement.fits_on(demand, gpu):
            return
    unit.device = "cpu"


def units_of(
    model: Any,
    whole: Sequence[TensorSize],
    onloaded: Mapping[str, int],
    adapter: Iterable[TensorSize],
) -> list[Unit]:
    """The units of a model, in the order in which they are offloaded; the rest is the last one."""
    units = [*_steps(model), Unit(parts.REST)]
    owners = {module: unit for unit in units for module in unit.modules}
    owners[""] = units[-1]

    def owner(name: str) -> Unit:
        return owners[covering(name, owners) or ""]

    experts = [tensor.name for tensor in whole if ".experts." in tensor.name]
    packed = {name.split(".experts.")[0] for name in experts if name.endswith(".absmax")}
    for tensor in whole:
        if tensor.buffer:
            owner(tensor.name).buffers += tensor.on_cuda
        else:
            owner(tensor.name).weights += tensor.on_cuda
    for name, taken in onloaded.items():
        unit = owner(name)
        before, is_expert, _ = name.partition(".experts.")
        if is_expert and before in packed:
            unit.experts += taken
        else:
            unit.onloaded += taken
        unit.largest = max(unit.largest, taken)
    for tensor in adapter:
        owner(tensor.name.removeprefix("base_model.model.")).adapter += tensor.on_cuda
    return units


def _steps(model: Any) -> Iterator[Unit]:
    tops: dict[str, list[str]] = {parts.PLE: [], parts.VISION: [], parts.AUDIO: []}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        part = parts.part_of(name)
        if part in tops and not parts.is_under(name, tops[part]):
            if next(module.parameters(), None) is not None:
                tops[part].append(name)
    yield from (Unit(part, tuple(names)) for part, names in tops.items() if names)
    # From the last one on.  In models that share keys and values the last layers are the largest.
    # And transformers < 5.23 treats layers.3 as a pattern that also matches layers.30: in this
    # order layers.30 to layers.39 are always offloaded before layers.3.
    for layer, name in reversed(parts.decoder_layers(modules).items()):
        yield Unit(parts.LAYERS, (name,), layer)
