"""Device maps: which entry places a module, which names it may mean, how devices are called."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..errors import InputError, suggestion
from .parts import is_under

OFFLOADED = ("cpu", "disk")
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
#: types of ``torch.device`` that compute, those of PyTorch and those that accelerate knows
_COMPUTES = (
    "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "npu", "mlu", "musa", "sdaa",
)  # fmt: skip
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


# -- checking what a user wrote -------------------------------------------------------------------


def device_name(text: str) -> str:
    """``text`` where it names a device that computes: "cpu", "cuda", "cuda:1", ...

    Raises:
        InputError: there is no such type of device.
    """
    kind = re.fullmatch(r"([a-z]+)(:\d+)?", text)
    if kind is None or kind[1] not in ("cpu", *_COMPUTES):
        hint = suggestion(text.partition(":")[0], ("cpu", *_COMPUTES))
        raise InputError(f'{text!r} is not a device{hint}: write "cpu", "cuda" or "cuda:1"')
    return text


def parse_map(text: str) -> dict[str, int | str]:
    """A device map from JSON: ``{"model.vision_tower": "cpu", "": 0}``.

    Raises:
        InputError: not JSON, not an object, or with values that are no devices.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        hint = "; write it in single quotes, its names in double quotes" if "'" in text else ""
        raise InputError(f"{text!r} is not JSON: {error}{hint}") from error
    return checked_map(parsed)


def checked_map(device_map: Any) -> dict[str, int | str]:
    """The map with its devices as numbers and text.

    Raises:
        InputError: it is not a map of names to devices.
    """
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        raise InputError(
            f"{device_map!r} is not a map: from_pretrained makes one from it, and "
            "model.hf_device_map shows that one"
        )
    if not isinstance(device_map, Mapping):
        raise InputError('a device map is an object such as {"model.vision_tower": "cpu", "": 0}')
    if not device_map:
        raise InputError("the device map is empty")
    return {_name(key): _device(key, value) for key, value in device_map.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'the device map has two entries "{twice}"')
    return dict(pairs)


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise InputError(f"the device map names {key!r}: names of modules are text")


def _device(key: str, value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value)  # of a torch.device, too
    kind = text.partition(":")[0]
    if text in OFFLOADED or (kind in _COMPUTES and re.fullmatch(r"[a-z]+(:\d+)?", text)):
        return text
    hint = suggestion(text, (*OFFLOADED, "cuda"))
    raise InputError(
        f'"{key}": {value!r} is not a device{hint}: write 0, "cuda:1", "cpu" or "disk"'
    )
