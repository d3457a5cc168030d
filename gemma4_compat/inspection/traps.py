"""The traps of a device map: each function describes one, or returns ``None``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..model import parts
from ..model.device_maps import OFFLOADED, device_label, left_out
from ..model.meta import COMPRESSED, QAT
from ..model.sizes import TensorSize
from ..results.text import plural, size, some
from .mapped import OFFLOAD_FLAG, Mapped


@dataclass(frozen=True)
class Trap:
    """A known problem or cost of a device map.

    ``level`` is "error" (loading or running fails), "warning" or "note".  Bugs with a patch are no
    traps: `status` says which patches are off.
    """

    name: str
    level: str
    text: str


def traps_of(mapped: Mapped) -> Iterator[Trap]:
    """All traps of this map, the errors first."""
    for level, functions in TRAPS.items():
        for find in functions:
            if text := find(mapped):
                yield Trap(find.__name__, level, text)


def compressed_tensors(mapped: Mapped) -> str | None:
    if mapped.method != COMPRESSED:
        return None
    return (
        "compressed-tensors restores all weights to bfloat16 in the first forward, and raises if "
        "any are offloaded: pass quantization_config=CompressedTensorsConfig(dequantize=True) to "
        "from_pretrained, which restores them while loading. The sizes above are these"
    )


def quantized_already(mapped: Mapped) -> str | None:
    if mapped.quantization is None or mapped.splits or mapped.method in (QAT, COMPRESSED):
        return None
    return (
        f"the checkpoint is already quantized ({mapped.method or 'unknown'}) and is loaded as it "
        "is; the sizes above are for the unquantized checkpoint, quantized while loading"
    )


def quantized_checkpoint(mapped: Mapped) -> str | None:
    if mapped.quantization is None or not mapped.splits or mapped.method in (QAT, COMPRESSED):
        return None
    return (
        "the checkpoint is already quantized: transformers refuses this map, or leaves the "
        "offloaded layers unquantized, which its quantized weights do not fit. Offload the "
        "unquantized checkpoint instead"
    )


def offload_flag(mapped: Mapped) -> str | None:
    if mapped.quantization is not None or not mapped.splits:
        return None
    return f"in 4 or 8 bit from_pretrained needs {OFFLOAD_FLAG}=True for this map"


def no_such_gpu(mapped: Mapped) -> str | None:
    import torch

    gpus = torch.cuda.device_count()
    for label in dict.fromkeys(map(device_label, mapped.map.values())):
        if gpus and label.startswith("GPU ") and int(label[4:]) >= gpus:
            return f"{label} does not exist: this machine has {plural(gpus, 'GPU')}"
    return None


def left_out_parts(mapped: Mapped) -> str | None:
    names = [key for key in mapped.unknown() if left_out(mapped.model, key)]
    return f"{', '.join(names)} is not in this checkpoint: no effect" if names else None


def tied(mapped: Mapped) -> str | None:
    for target, source in mapped.tied.items():
        first, second = mapped.rests_on(source), mapped.rests_on(target)
        one_offloaded = mapped.is_offloaded(source) != mapped.is_offloaded(target)
        if "disk" not in (first, second) and first != second and one_offloaded:
            names = f"{source.rpartition('.')[0]} and {target.rpartition('.')[0]}"
            return f"{names} are tied: while one is on a GPU, offloading the other saves nothing"
    return None


def tied_on_disk(mapped: Mapped) -> str | None:
    for target, source in mapped.tied.items():
        if mapped.rests_on(source) == "disk" != mapped.rests_on(target):
            both = f"{source.rpartition('.')[0]} and {target.rpartition('.')[0]}"
            return f'{both} are tied: with only the first on the disk it raises; map both to "cpu"'
    return None


def read_from_disk(mapped: Mapped) -> str | None:
    for tensor in mapped.whole[mapped.quants[-1]]:
        matches = [key for key in mapped.map if tensor.name.startswith(key)]
        match = max(matches, key=lambda key: (key.count("."), len(key)), default="")
        if (mapped.map.get(match) == "disk") != (mapped.rests_on(tensor.name) == "disk"):
            name = tensor.name.rpartition(".")[0]
            return f"{match} is also the beginning of {name}, and it raises: name both in the map"
    return None


def packed_on_disk(mapped: Mapped) -> str | None:
    for name, module in mapped.modules.items():
        if type(module).__name__ == "QuantizedLinear" and mapped.rests_on(name) == "disk":
            return f'{name} is packed in this QAT checkpoint: on the disk it raises; "cpu" works'
    return None


def split_layer(mapped: Mapped) -> str | None:
    blocks = set(getattr(mapped.model, "_no_split_modules", None) or ())
    names = [tensor.name for tensor in mapped.whole[mapped.quants[-1]]]
    torn = []
    for name, module in mapped.modules.items():
        if type(module).__name__ in blocks:
            inside = {mapped.computes_on(t) for t in names if parts.is_under(t, [name])}
            torn += [name] if len(inside) > 1 else []
    if not torn:
        return None
    return (
        f"modules inside {_grouped(torn)} compute on several devices: PyTorch raises 'found at "
        "least two devices' if their outputs are combined outside a module"
    )


def not_quantized_by_name(mapped: Mapped) -> str | None:
    for quant, names in mapped.kept.items():
        modules = [name for name in names if mapped.rests_on(name) not in OFFLOADED]
        if modules:
            more = _bytes(mapped.tensors[quant], modules) - _bytes(mapped.whole[quant], modules)
            return (
                f"{quant}: {_grouped(modules)} also stay in bfloat16, though they are not "
                "offloaded: transformers treats the map's names as patterns. They take "
                f"{size(more)} more"
            )
    return None


def not_quantized(mapped: Mapped) -> str | None:
    most, instead = 0, []
    for quant, names in mapped.kept.items():
        modules = [name for name in names if mapped.rests_on(name) in OFFLOADED]
        most = max(most, _bytes(mapped.tensors[quant], modules))
        if modules:
            instead.append(f"{size(_bytes(mapped.whole[quant], modules))} ({quant})")
    if not instead:
        return None
    return (
        f"offloaded modules are not quantized (transformers' design): {size(most)} instead "
        f"of {', '.join(instead)}"
    )


#: the traps' functions by level, in the order in which they are shown
TRAPS: dict[str, tuple[Callable[[Mapped], str | None], ...]] = {
    "error": (quantized_checkpoint, no_such_gpu, tied_on_disk, read_from_disk, packed_on_disk),
    "warning": (tied, split_layer, not_quantized_by_name),
    "note": (left_out_parts, compressed_tensors, quantized_already, offload_flag, not_quantized),
}


def _bytes(tensors: Iterable[TensorSize], modules: list[str]) -> int:
    return sum(tensor.bytes for tensor in tensors if parts.is_under(tensor.name, modules))


def _grouped(names: Iterable[str]) -> str:
    """The first three names, each layer once, and how many more there are."""
    layers = dict.fromkeys(re.sub(r"(layers\.\d+)\..*", r"\1", name) for name in names)
    return some(list(layers), 3)
