"""Device maps: which entry places a module, which names it may mean, how devices are called."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from .parts import is_under

OFFLOADED = ("cpu", "disk")
#: What earlier Gemma, LLaVA and other multimodal models call the parts of this one.
_FORMERLY = {
    "multi_modal_projector": "embed_vision",
    "mm_projector": "embed_vision",
    "vision_model": "vision_tower",
    "vision_encoder": "vision_tower",
    "visual": "vision_tower",
    "audio_projector": "embed_audio",
    "audio_model": "audio_tower",
    "audio_encoder": "audio_tower",
    "text_model": "language_model",
}
#: by name of a module: the device it executes on, and whether it is offloaded
Placement = dict[str, tuple[Any, bool]]


def covering(name: str, entries: Iterable[str]) -> str | None:
    """The entry of a map that places a module or tensor: the longest one that covers it."""
    found = [entry for entry in entries if not entry or is_under(name, [entry])]
    return max(found, key=len, default=None)


def above(name: str) -> Iterator[str]:
    """The names of the modules around a module, from the inside out; the root is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def differs(name: str, placement: Placement) -> bool:
    """Whether the nearest entry that covers this one says otherwise."""
    nearest = next((placement[outer] for outer in above(name) if outer in placement), None)
    return nearest is not None and nearest != placement[name]


def left_out(model: Any, key: str) -> bool:
    """A part that the class has but this checkpoint goes without: 31B has no audio tower."""
    try:
        for part in key.split("."):
            model = getattr(model, part)
    except AttributeError:
        return False
    return model is None


def closest(key: str, modules: Collection[str]) -> str | None:
    """The module that a key may mean: renamed, at another depth, or misspelt."""
    from difflib import SequenceMatcher, get_close_matches

    wanted = [_FORMERLY.get(part, part) for part in key.split(".")]
    if ".".join(wanted) in modules:
        return ".".join(wanted)
    paths = (name.split(".") for name in modules)
    same_end = [path for path in paths if path[-1] == wanted[-1]]
    ratios = [SequenceMatcher(None, wanted, path).ratio() for path in same_end]
    if ratios and max(ratios) > 0.6:
        return ".".join(same_end[ratios.index(max(ratios))])
    shallow = [name for name in modules if name.count(".") <= len(wanted)]
    return next(iter(get_close_matches(".".join(wanted), shallow, n=1, cutoff=0.85)), None)


def device_label(device: int | str) -> str:
    """A device of a map as "GPU 0", "CPU" or "disk"; others as they are."""
    text = str(device)
    if text.removeprefix("cuda:").isdigit():
        return f"GPU {text.removeprefix('cuda:')}"
    return {"cuda": "GPU 0", "cpu": "CPU"}.get(text, text)


def device_order(device: int | str) -> tuple[int, str]:
    """To sort by: GPUs by number, then other devices, the CPU and the disk."""
    label = device_label(device)
    if label.startswith("GPU "):
        return int(label[4:]), ""
    return 1000 + ("CPU", "disk").index(label) if label in ("CPU", "disk") else 999, label
