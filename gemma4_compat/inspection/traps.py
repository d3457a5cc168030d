"""The traps of a device map: each function takes the mapped model and yields one kind of trap."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..model import parts
from ..model.device_maps import OFFLOADED, device_label, device_order
from ..model.files import has_safetensors
from ..text import plural, size
from .mapped import OFFLOAD_FLAG, Mapped

LEVELS = ("error", "warning", "note")


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
    """All traps of this map."""
    for trap in TRAPS:
        yield from trap(mapped)


def not_covered(mapped: Mapped) -> Iterator[Trap]:
    if not any(mapped.uncovered()):
        return
    if len(set(mapped.map.values())) > 1 or "disk" in mapped.map.values():
        text = (
            "some modules have no entry, and from_pretrained raises 'The device_map provided does "
            'not give any device for the following parameters\'; add an entry for ""'
        )
        yield Trap("uncovered", "error", text)
    elif mapped.main != "cpu":
        text = (
            "modules without an entry stay on the CPU and compute there, without a warning "
            'and without hooks between the devices; add an entry for ""'
        )
        yield Trap("uncovered", "error", text)


def quantised_already(mapped: Mapped) -> Iterator[Trap]:
    quantised = mapped.source.quantization
    if quantised is not None and not mapped.splits:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else None
        text = (
            f"the checkpoint is already quantised ({method or 'unknown'}) and is loaded as it is; "
            "the sizes above are for the unquantised checkpoint, quantised while loading"
        )
        yield Trap("quantised_already", "note", text)


def refused(mapped: Mapped) -> Iterator[Trap]:
    if not mapped.splits:
        return
    flag = OFFLOAD_FLAG
    quantised, config = mapped.source.quantization, mapped.quantization_config
    if quantised is not None:
        # transformers uses the checkpoint's own config, not quantization_config.
        if isinstance(quantised, dict) and quantised.get(flag):
            text = (
                "the checkpoint is already quantised: transformers makes the offloaded layers "
                "unquantised, and the quantised weights do not fit them (size mismatch)"
            )
        else:
            text = f"the checkpoint is already quantised, and its config lacks {flag} for this map"
        text += ". Offload the unquantised checkpoint instead"
        yield Trap("quantised_checkpoint", "error", text)
        return
    if config is None:
        text = f"in 4 or 8 bit from_pretrained needs {flag}=True for this map"
        yield Trap("offload_flag", "note", text)
    elif not getattr(config, flag, False):
        text = f"from_pretrained refuses this map without {flag}=True in quantization_config"
        yield Trap("offload_flag", "error", text)


def disk(mapped: Mapped) -> Iterator[Trap]:
    if "disk" not in mapped.map.values() or mapped.offload_folder is not None:
        return
    checkpoint = mapped.source.checkpoint
    if checkpoint is not None and has_safetensors(checkpoint):
        text = (
            "weights on disk are read from the checkpoint's safetensors files; without "
            "offload_folder loading fails only for weights that transformers converts, such as "
            "the experts of 26B-A4B"
        )
        yield Trap("disk", "note", text)
    else:
        text = (
            "an entry for the disk needs offload_folder, unless the checkpoint has safetensors "
            "files, which the weights are then read from"
        )
        yield Trap("disk", "warning", text)


def no_such_gpu(mapped: Mapped) -> Iterator[Trap]:
    import torch

    gpus = torch.cuda.device_count()
    for device in dict.fromkeys(mapped.map.values()):
        label = device_label(device)
        if gpus and label.startswith("GPU ") and int(label[4:]) >= gpus:
            text = f"{label} does not exist: this machine has {plural(gpus, 'GPU')}"
            yield Trap("no_such_gpu", "error", text)


def tied(mapped: Mapped) -> Iterator[Trap]:
    for target, source in mapped.tied.items():
        first, second = mapped.rests_on(source), mapped.rests_on(target)
        names = f"{source.rpartition('.')[0]} and {target.rpartition('.')[0]}"
        one_offloaded = mapped.is_offloaded(source) != mapped.is_offloaded(target)
        if "disk" not in (first, second) and first != second and one_offloaded:
            text = f"{names} are tied: while one is on a GPU, offloading the other saves nothing"
            yield Trap("tied", "warning", text)


def split_layers(mapped: Mapped) -> Iterator[Trap]:
    blocks = set(getattr(mapped.model, "_no_split_modules", None) or ())
    names = [t.name for t in mapped.whole["bf16"]]
    torn = []
    for name, module in mapped.modules.items():
        if type(module).__name__ in blocks:
            inside = {mapped.computes_on(t) for t in names if parts.is_under(t, [name])}
            torn += [name] if len(inside) > 1 else []
    if torn:
        text = (
            f"modules inside {_grouped(torn)} compute on several devices: PyTorch raises 'found at "
            "least two devices' if their outputs are combined outside a module"
        )
        yield Trap("split_layer", "warning", text)


def shared_kv(mapped: Mapped) -> Iterator[Trap]:
    text_config = mapped.model.config.get_text_config()
    types = list(getattr(text_config, "layer_types", None) or ())
    shared, layers = parts.shared_layers(text_config), mapped.layers
    if not shared or len(types) < len(layers):
        return
    copied = []
    for index in range(shared.start, len(types)):
        producers = [i for i in range(shared.start) if types[i] == types[index] and i in layers]
        if producers and index in layers:
            devices = {mapped.computes_on(f"{layers[i]}.self_attn") for i in (producers[-1], index)}
            copied += [(producers[-1], index)] if len(devices) > 1 else []
    if copied:
        sources = ", ".join(map(str, dict.fromkeys(source for source, _ in copied)))
        text = (
            f"the keys and values of layers {sources} go from GPU to GPU for each token, to "
            f"{plural(len(copied), 'layer')} that share them; put all of these on one GPU to avoid "
            "it"
        )
        yield Trap("kv_between_gpus", "note", text)


def second_gpu(mapped: Mapped) -> Iterator[Trap]:
    gpus = sorted({d for d in mapped.map.values() if d not in OFFLOADED}, key=device_order)
    if len(gpus) < 2:
        return
    labels = ", ".join(map(device_label, gpus))
    text = f"{labels} compute one after the other, and hidden states are copied between them"
    yield Trap("several_gpus", "note", text)


def decoder_layers(mapped: Mapped) -> Iterator[Trap]:
    layers = [name for name in mapped.layers.values() if mapped.is_offloaded(name)]
    if not layers:
        return
    tensors = mapped.tensors["bf16"]
    moved = sum(t.bytes for t in tensors if parts.is_under(t.name, layers) and not t.buffer)
    text = (
        f"{plural(len(layers), 'decoder layer')} off the GPU: {size(moved)} in bfloat16 are "
        "copied to it for each token. A map that names layers leaves them in bfloat16; "
        'device_map="auto" with max_memory offloads them in 4 bit, and offload_streaming then '
        "copies them ahead of time"
    )
    yield Trap("decoder_layers", "note", text)


def no_pattern(mapped: Mapped) -> Iterator[Trap]:
    if mapped.no_patterns and mapped.splits:
        names = ", ".join(mapped.no_patterns)
        text = (
            f"{names}: in 4 or 8 bit from_pretrained raises re.error: transformers treats the "
            "names of offloaded modules as regular expressions, and this is not one"
        )
        yield Trap("no_pattern", "error", text)


def nothing_quantised(mapped: Mapped) -> Iterator[Trap]:
    if mapped.lost:
        text = (
            f"{', '.join(mapped.lost)}: not one linear layer is quantised. With "
            f"{OFFLOAD_FLAG}=True transformers quantises nothing that the map puts on the CPU or "
            "the disk, and this map puts everything there"
        )
        if set(mapped.map.values()) == {"cpu"}:
            text += f". Omit {OFFLOAD_FLAG}: without it, layers on the CPU are quantised"
        yield Trap("nothing_quantised", "warning", text)


def not_quantised(mapped: Mapped) -> Iterator[Trap]:
    if mapped.lost:
        return
    by_design: dict[str, tuple[int, int]] = {}
    for quant, names in mapped.kept.items():
        for offloaded in (True, False):
            modules = [name for name in names if mapped.is_offloaded(name) is offloaded]
            kept, quantised = (
                sum(t.bytes for t in tensors[quant] if parts.is_under(t.name, modules))
                for tensors in (mapped.tensors, mapped.whole)
            )
            if offloaded and modules:
                by_design[quant] = kept, quantised
            elif modules:
                text = (
                    f"{quant}: {_grouped(modules)} also stay in bfloat16, though they are not "
                    "offloaded: transformers treats the map's names as patterns. They take "
                    f"{size(kept - quantised)} more"
                )
                yield Trap("not_quantised_by_name", "warning", text)
    if by_design:
        kept = max(kept for kept, _ in by_design.values())
        text = (
            f"offloaded modules are not quantised (transformers' design): {size(kept)} instead "
            f"of {_by_quant(by_design, (quantised for _, quantised in by_design.values()))}"
        )
        yield Trap("not_quantised", "note", text)


TRAPS: tuple[Callable[[Mapped], Iterator[Trap]], ...] = (
    not_covered,
    quantised_already,
    refused,
    disk,
    no_such_gpu,
    tied,
    split_layers,
    shared_kv,
    second_gpu,
    decoder_layers,
    no_pattern,
    nothing_quantised,
    not_quantised,
)


def _by_quant(quants: Iterable[str], numbers: Iterable[int]) -> str:
    return ", ".join(f"{size(n)} ({q})" for q, n in zip(quants, numbers, strict=True))


def _grouped(names: Iterable[str], most: int = 3) -> str:
    """The first ``most`` names, each layer once, and how many more there are."""
    tops: list[str] = []
    for name in names:
        layer = re.match(r"(.*?layers\.\d+)(\.|$)", name)
        top = layer[1] if layer else name
        if top not in tops:
            tops.append(top)
    first = ", ".join(tops[:most])
    return first if len(tops) <= most else f"{first} and {len(tops) - most} more"
