"""Device maps: the entry that places a module, the module that a key may mean, device names."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, failures_of, suggestion

OFFLOADED = ("cpu", "disk")
#: types of ``torch.device`` that can be execution devices: PyTorch's, and those accelerate knows
_COMPUTES = (
    "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "npu", "mlu", "musa", "sdaa",
)  # fmt: skip
# With quotes: zsh expands a word that begins with "=", and a comma separates words in PowerShell.
_FORMS = (
    'write KEY=DEVICE pairs (--map "model.vision_tower=cpu,=0"), JSON or a Python dict, or name a '
    "file that contains one (- reads stdin)"
)
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


def covering(name: str, entries: Collection[str]) -> str | None:
    """The entry of a device map that places a module or tensor: the longest one that covers it."""
    return next((entry for entry in (name, *above(name)) if entry in entries), None)


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


def read_map(text: str) -> dict[str, int | str]:
    """The device map that one ``--map`` names.

    It is a file's name, "-" for stdin, or a text as in `parse_map`.  An existing file is preferred.

    Raises:
        InputError: it is none of them, or a value is not a device.
    """
    if text != "-" and not os.path.isfile(text):
        return parse_map(text)
    source = "stdin" if text == "-" else text
    with failures_of(f"{source}: cannot be read"):
        raw = sys.stdin.buffer.read() if text == "-" else Path(text).read_bytes()
        # Windows PowerShell writes UTF-16, with a mark.
        content = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    return parse_map(content, source)


def parse_map(text: str, source: str | None = None) -> dict[str, int | str]:
    """Read a device map from text.

    The text is JSON or a Python dict, as in ``{"model.vision_tower": "cpu", "": 0}``, or KEY=DEVICE
    pairs with commas between them, as in ``model.vision_tower=cpu,=0``.  ``source`` is where the
    text comes from; messages name it.

    Raises:
        InputError: it is none of them, a value is not a device, or a key is there twice.
    """
    try:
        pairs = _pairs(text)
        found = dict(pairs)
    except Exception as error:  # a text can be wrong in many ways
        # Not repr, which doubles the backslashes of a path.
        start = f"'{text if len(text) <= 60 else text[:57] + '...'}'".replace("\n", " ")
        raise InputError(f"{source or start} is not a device map: {_FORMS}") from error
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f'"{twice[0]}" is in the device map twice: remove one of the entries')
    return checked_map(found)


def _pairs(text: str) -> list[tuple[Any, Any]]:
    """The entries of a dict, or of "KEY=DEVICE,KEY=DEVICE" with commas or lines between them."""
    if text.lstrip().startswith("{"):
        # A dict of JSON is one of Python, too, if its values are numbers and strings.
        tree: Any = ast.parse(text.strip(), mode="eval").body
        keys, values = (map(ast.literal_eval, each) for each in (tree.keys, tree.values))
        return list(zip(keys, values, strict=True))
    pairs: list[tuple[Any, Any]] = []
    for piece in filter(str.strip, re.split("[,\n]", text)):
        key, device = map(str.strip, piece.rsplit("=", 1))
        pairs.append((key, int(device) if device.isdecimal() else device))
    if not pairs:
        raise ValueError("no pairs")
    return pairs


def checked_map(device_map: Any) -> dict[str, int | str]:
    """The device map with each device as an int or str.

    Raises:
        InputError: it does not map module names to devices.
    """
    if not isinstance(device_map, Mapping):
        raise InputError(
            f'{device_map!r} is not a device map such as {{"model.vision_tower": "cpu", "": 0}}; '
            f"if from_pretrained made one, pass model.hf_device_map"
        )
    if not device_map:
        raise InputError("the device map is empty")
    return {key: _device(key, value) for key, value in device_map.items()}


def _device(key: Any, value: Any) -> int | str:
    if not isinstance(key, str):
        raise InputError(f"the device map has the key {key!r}: module names must be strings")
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
