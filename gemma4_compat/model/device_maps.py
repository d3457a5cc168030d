"""Device maps: the entry that places a module, the module that a key may mean, device names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..errors import InputError, suggestion
from .parts import is_under

OFFLOADED = ("cpu", "disk")
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
#: types of ``torch.device`` that can be execution devices: PyTorch's, and those accelerate knows
_COMPUTES = (
    "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "npu", "mlu", "musa", "sdaa",
)  # fmt: skip
#: The names that earlier Gemma, LLaVA and other multimodal models use for the parts of Gemma 4.
_FORMER_NAMES = {
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
#: maps a module's name to its execution device, and to whether it is offloaded
Placement = dict[str, tuple[Any, bool]]


def covering(name: str, entries: Iterable[str]) -> str | None:
    """The entry of a device map that places a module or tensor: the longest one that covers it."""
    covers = [entry for entry in entries if not entry or is_under(name, [entry])]
    return max(covers, key=len, default=None)


def above(name: str) -> Iterator[str]:
    """The names of the modules that contain a module, the innermost first; the root is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def differs(name: str, placement: Placement) -> bool:
    """Whether the nearest entry that covers this module places it elsewhere."""
    nearest = next((placement[outer] for outer in above(name) if outer in placement), None)
    return nearest is not None and nearest != placement[name]


def left_out(model: Any, key: str) -> bool:
    """Whether the key names a part that this checkpoint lacks, as 31B lacks the audio tower."""
    try:
        for part in key.split("."):
            model = getattr(model, part)
    except AttributeError:
        return False
    return model is None


def closest(key: str, modules: Collection[str]) -> str | None:
    """The module that a key may mean if it is renamed, at another depth, or misspelt."""
    from difflib import SequenceMatcher, get_close_matches

    renamed = [_FORMER_NAMES.get(part, part) for part in key.split(".")]
    if ".".join(renamed) in modules:
        return ".".join(renamed)
    paths = (name.split(".") for name in modules)
    same_end = [path for path in paths if path[-1] == renamed[-1]]
    ratios = [SequenceMatcher(None, renamed, path).ratio() for path in same_end]
    if ratios and max(ratios) > 0.6:
        return ".".join(same_end[ratios.index(max(ratios))])
    shallow = [name for name in modules if name.count(".") <= len(renamed)]
    return next(iter(get_close_matches(".".join(renamed), shallow, n=1, cutoff=0.85)), None)


def device_label(device: int | str) -> str:
    """A device of a device map as "GPU 0", "CPU" or "disk"; other devices unchanged."""
    text = str(device)
    if text.removeprefix("cuda:").isdigit():
        return f"GPU {text.removeprefix('cuda:')}"
    return {"cuda": "GPU 0", "cpu": "CPU"}.get(text, text)


def device_order(device: int | str) -> tuple[int, str]:
    """A sort key: GPUs by number, then other devices, then the CPU and the disk."""
    label = device_label(device)
    if label.startswith("GPU "):
        return int(label[4:]), ""
    return 1000 + ("CPU", "disk").index(label) if label in ("CPU", "disk") else 999, label


# -- checking the user's input --------------------------------------------------------------------


def device_name(text: str) -> str:
    """Return ``text`` if it names an execution device: "cpu", "cuda", "cuda:1", ...

    Raises:
        InputError: it does not.
    """
    kind = re.fullmatch(r"([a-z]+)(:\d+)?", text)
    if kind is None or kind[1] not in ("cpu", *_COMPUTES):
        hint = suggestion(text.partition(":")[0], ("cpu", *_COMPUTES))
        raise InputError(f'{text!r} is not a device{hint}: write "cpu", "cuda" or "cuda:1"')
    return text


def parse_map(text: str) -> dict[str, int | str]:
    """Read a device map from JSON, as in ``{"model.vision_tower": "cpu", "": 0}``.

    Raises:
        InputError: the text is not JSON or not an object, or a value is not a device.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        hint = "; put the map in single quotes, and names in double quotes" if "'" in text else ""
        raise InputError(f"{text!r} is not JSON: {error}{hint}") from error
    return checked_map(parsed)


def checked_map(device_map: Any) -> dict[str, int | str]:
    """The device map with each device as an int or str.

    Raises:
        InputError: it does not map module names to devices.
    """
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        raise InputError(
            f"{device_map!r} is not a device map: from_pretrained makes one from it; pass its "
            "result, model.hf_device_map"
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
    raise InputError(f"the device map has the key {key!r}: module names must be strings")


def _device(key: str, value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value)  # works for a torch.device, too
    kind = text.partition(":")[0]
    if text in OFFLOADED or (kind in _COMPUTES and re.fullmatch(r"[a-z]+(:\d+)?", text)):
        return text
    hint = suggestion(text, (*OFFLOADED, "cuda"))
    raise InputError(
        f'"{key}": {value!r} is not a device{hint}: write 0, "cuda:1", "cpu" or "disk"'
    )
