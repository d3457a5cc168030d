"""Device maps: the entry that places a module, the module that a key may mean, device names."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..errors import InputError, suggestion
from .files import decoded_text, read_text

OFFLOADED = ("cpu", "disk")
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
#: types of ``torch.device`` that can be execution devices: PyTorch's, and those accelerate knows
_COMPUTES = (
    "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "npu", "mlu", "musa", "sdaa",
)  # fmt: skip
# With quotes: zsh expands a word that begins with "=", and a comma separates words in PowerShell.
_PAIRS = 'KEY=DEVICE pairs (--map "model.vision_tower=cpu,=0")'
_FORMS = f"write {_PAIRS}, JSON or a Python dict, or name a file that contains one (- reads stdin)"
#: The beginning of JSON without its quotes, or with the single quotes that cmd.exe keeps.
_LOST_QUOTES = re.compile(r"""\s*('\s*\{|\{\s*([\w.:]|":))""")
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


def read_map(text: str) -> dict[str, int | str]:
    """The device map that one ``--map`` names.

    It is a file's name, "-" for stdin, or a text as in `parse_map`.  An existing file is preferred.

    Raises:
        InputError: it is none of them, or a value is not a device.
    """
    if text == "-":
        return parse_map(decoded_text("stdin", sys.stdin.buffer.read()), "stdin")
    if os.path.isfile(text):
        return parse_map(read_text(text), text)
    return parse_map(text)


def parse_map(text: str, source: str | None = None) -> dict[str, int | str]:
    """Read a device map from text.

    The text is JSON or a Python dict, as in ``{"model.vision_tower": "cpu", "": 0}``, also after
    ``device_map =``, or KEY=DEVICE pairs with commas between them, as in
    ``model.vision_tower=cpu,=0``.  ``source`` is where the text comes from; messages name it.

    Raises:
        InputError: it is none of them, or a value is not a device.
    """
    body = re.sub(r"^\s*device_map\s*=\s*(?=\{)", "", text).strip()
    if body in _AUTOMATIC:
        return checked_map(body)
    if body[:1] in ("{", "[", '"'):
        return checked_map(_literal(body, source))
    pairs = _pairs(body)
    if pairs is not None:
        return checked_map(_without_duplicates(pairs))
    if _LOST_QUOTES.match(text) and source is None:
        raise _lost_quotes(text)
    what = "is neither a file nor a device map" if source is None else "contains no device map"
    raise InputError(f"{source or _start(text)} {what}: {_FORMS}")


def joined(first: Mapping[str, int | str], second: Mapping[str, int | str]) -> dict[str, int | str]:
    """Both device maps together.

    Raises:
        InputError: both have an entry of the same name.
    """
    return _without_duplicates([*first.items(), *second.items()])


def _literal(text: str, source: str | None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        why = error
    try:
        return _python_dict(text)
    except InputError:
        raise
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if _LOST_QUOTES.match(text) and source is None:
        raise _lost_quotes(text) from why
    what = f"is not JSON ({why}), and not a Python dict"
    raise InputError(f"{source or _start(text)} {what}: {_FORMS}") from why


def _python_dict(text: str) -> Any:
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.Dict):
        raise ValueError("not a dict")
    pairs = []
    for key, value in zip(tree.keys, tree.values, strict=True):
        if key is None:
            raise ValueError("not a literal")
        pairs.append((ast.literal_eval(key), ast.literal_eval(value)))
    return _without_duplicates(pairs)


def _pairs(text: str) -> list[tuple[str, int | str]] | None:
    """The entries of "KEY=DEVICE,KEY=DEVICE", or ``None``; a key may contain commas.

    In a file there may be lines instead of commas.
    """
    pairs: list[tuple[str, int | str]] = []
    key = ""
    for piece in filter(str.strip, re.split("[,\n]", text)):
        start, equals, device = piece.rpartition("=")
        if not equals:
            key += f"{piece},"
            continue
        device = device.strip()
        pairs.append(((key + start).strip(), int(device) if device.isdecimal() else device))
        key = ""
    return None if key or not pairs else pairs


def _lost_quotes(text: str) -> InputError:
    return InputError(f"{_start(text)}: the shell removed the quotes: write {_PAIRS} or --map FILE")


def _start(text: str) -> str:
    # Not repr, which doubles the backslashes of a path.
    return f"'{text if len(text) <= 60 else text[:57] + '...'}'"


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
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
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
