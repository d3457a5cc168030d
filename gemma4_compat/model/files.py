"""Reading what describes a checkpoint: JSON files, and the headers of safetensors files.

No tensor data is read, so a file whose tensors are cut off is read like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: safetensors itself refuses a longer header
_LONGEST_HEADER = 100_000_000
_POINTER = b"version https://git-lfs"
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor as a safetensors header describes it; ``dtype`` in its terms, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: Path

    @property
    def numel(self) -> int:
        numbers = 1
        for length in self.shape:
            numbers *= length
        return numbers


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    ``tensors`` is by name, in the order of their data.  ``missing`` is how many bytes the file is
    too short for its tensors; 0 where it is complete.
    """

    file: Path
    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    missing: int


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """The folder as a ``Path``.

    Raises:
        InputError: there is no such folder.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    raise InputError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """What the system says of a file is said as ``InputError``."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error


def _refuse_pointer(file: Path, raw: bytes) -> None:
    if raw.startswith(_POINTER):
        raise InputError(f"{file}: a Git LFS pointer, not the file itself: run git lfs pull")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: no such file, not JSON, or JSON of another kind.
    """
    file = Path(path)
    with _reading(file):
        raw = file.read_bytes()
    _refuse_pointer(file, raw)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a JSON object")
    return content


def read_config(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """``config.json`` of a model's folder.

    Raises:
        InputError: no such folder, no ``config.json`` in it, or not a model's.
    """
    folder = existing_folder(model_dir)
    file = folder / "config.json"
    if not file.is_file():
        kind = " (an adapter's folder?)" if (folder / "adapter_config.json").is_file() else ""
        raise InputError(f"{folder}: no config.json{kind}")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{file}: not a model's config (no model_type)")
    return config


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file; its tensors are not read.

    Raises:
        InputError: no such file, or its header is damaged.
    """
    file = Path(path)
    with _reading(file):
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            readable = len(start) == 8 and length <= min(size - 8, _LONGEST_HEADER)
            raw = opened.read(length) if readable else start + opened.read(len(_POINTER))
    _refuse_pointer(file, raw)
    if not readable:
        if len(start) < 8 or length <= _LONGEST_HEADER:
            raise InputError(f"{file}: cut off in the safetensors header ({size} bytes)")
        raise InputError(f"{file}: not a safetensors file")
    try:
        content = json.loads(raw)
        metadata = content.pop("__metadata__", {})
        entries = [_entry(name, told, file) for name, told in content.items()]
        entries.sort(key=lambda entry: content[entry.name]["data_offsets"])
        end = max((content[entry.name]["data_offsets"][1] for entry in entries), default=0)
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: not a safetensors file, or its header is damaged") from error
    missing = max(8 + length + end - size, 0)
    return Header(file, {entry.name: entry for entry in entries}, metadata, missing)


def _entry(name: str, told: Mapping[str, Any], file: Path) -> Entry:
    shape = tuple(int(length) for length in told["shape"])
    start, end = told["data_offsets"]
    entry = Entry(name, str(told["dtype"]), shape, int(end) - int(start), file)
    bits = _ITEM_BITS.get(entry.dtype)  # a dtype that is not known here is taken as it is
    if bits is not None and entry.bytes * 8 != entry.numel * bits:
        raise ValueError(f"{name}: {entry.bytes} bytes do not hold {shape} of {entry.dtype}")
    return entry


def weight_headers(model_dir: str | os.PathLike[str]) -> tuple[Header, ...]:
    """The headers of a checkpoint's weights: ``model.safetensors``, or the shards of its index.

    Raises:
        InputError: no safetensors weights, a shard that the index names is missing, or a damaged
            file.
    """
    folder = existing_folder(model_dir)
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return (read_header(folder / WEIGHTS),)
    if not index.is_file():
        other = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")
                 if (folder / name).is_file()]  # fmt: skip
        only = f" (only {other[0]}, which is not read)" if other else ""
        raise InputError(f"{folder}: no {WEIGHTS} and no {INDEX}{only}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index}: no weight_map")
    headers = []
    for name in sorted(set(places.values())):
        try:
            headers.append(read_header(folder / name))
        except InputError as error:
            raise InputError(f"{error} (a shard that {INDEX} names)") from error
    found = {name: header.file.name for header in headers for name in header.tensors}
    for tensor, shard in places.items():
        if found.get(tensor) != Path(shard).name:
            raise InputError(f"{folder / shard}: no tensor {tensor}, which {INDEX} says it holds")
    return tuple(headers)


def read_tensors(model_dir: str | os.PathLike[str]) -> dict[str, Entry]:
    """Every tensor of a checkpoint's weights, by name; raises as `weight_headers` does."""
    return {
        name: entry
        for header in weight_headers(model_dir)
        for name, entry in header.tensors.items()
    }
