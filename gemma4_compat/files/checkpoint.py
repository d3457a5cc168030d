"""Reads the JSON files and safetensors headers of a checkpoint or an adapter.

This module reads every file that a user names, and refuses invalid ones.  It reads no tensor data.
A checkpoint or an adapter is a local folder or a repository on the Hub: `located` says which, and
the other functions accept both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from ..errors import InputError
from .hub import Repository, repository

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: bytes; safetensors itself refuses a longer header
_LONGEST_HEADER = 100_000_000
_POINTER = b"version https://git-lfs"
T = TypeVar("T")
#: what names a checkpoint or an adapter: a folder's path or a Hub id
Location = str | os.PathLike[str] | Repository
LOCATIONS = (str, os.PathLike, Repository)
#: the type of each entry of an adapter's config, and the type of the values in a list or dict
_ADAPTER_KINDS: Mapping[str, tuple[Any, Any]] = {
    "peft_type": (str, str),
    "base_model_name_or_path": (str, str),
    "r": (int, int),
    "lora_alpha": ((int, float), int),
    "rank_pattern": (dict, (int, list)),  # AdaLoRA has lists
    "alpha_pattern": (dict, (int, float)),
    "trainable_token_indices": ((list, dict), (int, list)),
    "target_modules": ((str, list), str),
    "target_parameters": ((str, list), str),
    "exclude_modules": ((str, list), str),
    "modules_to_save": (list, str),
    "layers_to_transform": ((int, list), int),
    "layers_pattern": ((str, list), str),
}


@dataclass(frozen=True)
class Entry:
    """A tensor as a safetensors header describes it; ``dtype`` is a name such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: PurePath

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


#: the header of a safetensors file: its tensors by name, in the order of their data
Header = dict[str, Entry]


# -- folders and repositories -------------------------------------------------------------------


def located(location: Location, kind: str = "folder") -> Path | Repository:
    """The local folder, or the repository on the Hub.

    An existing path is never taken for a Hub id.  The Hub is not asked yet.  ``kind`` is what the
    error message says is missing.

    Raises:
        InputError: there is no such folder, and the text cannot be a Hub id.
    """
    found = with_repository(location)
    return found if isinstance(found, Repository) else existing_folder(found, kind)


def with_repository(location: T) -> T | Repository:
    """The repository that a Hub id names; anything else, such as a path or a model, unchanged."""
    if isinstance(location, str) and not os.path.lexists(location):
        return repository(location) or location
    return location


def file_in(folder: Path | Repository, name: str) -> Path | None:
    """A small file of a folder or repository, or ``None``; one on the Hub is downloaded.

    Raises:
        InputError: the repository cannot be read.
    """
    if isinstance(folder, Repository):
        return folder.file(name)
    return folder / name if is_in(folder, name) else None


def is_in(folder: Path | Repository, name: str) -> bool:
    """Whether a folder or repository has a file of this name; nothing is downloaded.

    Raises:
        InputError: the repository cannot be read.
    """
    if isinstance(folder, Repository):
        return folder.contains(name)
    return os.path.lexists(folder / name)  # a broken link counts


def existing_folder(path: str | os.PathLike[str], kind: str = "folder") -> Path:
    """The folder as a ``Path``.

    Raises:
        InputError: it does not exist, cannot be read, or is not a folder.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        with _refusals(folder, kind):
            folder.stat()
        raise InputError(f"{folder}: not a folder")
    return folder


@contextmanager
def _refusals(path: Path, kind: str = "file") -> Iterator[None]:
    """Turn the operating system's errors about a path into ``InputError``."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such {kind}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


# -- JSON ---------------------------------------------------------------------------------------


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: the file cannot be read, or does not contain a JSON object.
    """
    file = Path(path)
    with _refusals(file):
        raw = file.read_bytes()
    _refuse_pointer(file, raw)
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a JSON object")
    return content


def _refuse_pointer(file: Path, raw: bytes) -> None:
    if raw.startswith(_POINTER):
        raise InputError(f"{file}: a Git LFS pointer, not the file itself: run git lfs pull")


def config_file(model_dir: Location) -> Path:
    """The local ``config.json`` of a model; that of a repository is in the Hub's cache.

    Raises:
        InputError: there is none.
    """
    folder = located(model_dir)
    file = file_in(folder, CONFIG)
    if file is None:
        kind = " (an adapter's folder?)" if is_in(folder, ADAPTER_CONFIG) else ""
        raise InputError(f"{folder}: no {CONFIG}{kind}")
    return file


def read_config(model_dir: Location) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Raises:
        InputError: there is no such folder or repository, or it has no ``config.json`` of a model.
    """
    file = config_file(model_dir)
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{file}: not a model's config (no model_type)")
    return config


def read_adapter_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """An ``adapter_config.json``; the entries that we use have the types that PEFT writes.

    Raises:
        InputError: the file cannot be read, or an entry has another type.
    """
    config = read_json(path)
    for name, (kind, inside) in _ADAPTER_KINDS.items():
        value = config.get(name)
        items = value if isinstance(value, list) else []
        items = list(value.values()) if isinstance(value, dict) else items
        wrong = not isinstance(value, kind) or not all(isinstance(each, inside) for each in items)
        infinite = (isinstance(n, float) and not math.isfinite(n) for n in (value, *items))
        if value is not None and (wrong or any(infinite)):
            raise InputError(f"{path}: {name} cannot be {json.dumps(value)}")
    return config


# -- safetensors --------------------------------------------------------------------------------


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file; its tensor data is not read.

    Raises:
        InputError: the file cannot be read, its header is damaged, or it is cut off.
    """
    file = Path(path)
    with _refusals(file), file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        raw = opened.read(min(length, _LONGEST_HEADER))
        size = os.fstat(opened.fileno()).st_size
    _refuse_pointer(file, start + raw)
    try:
        described = json.loads(raw)
        described.pop("__metadata__", None)
        tensors = _entries(described, file)
    except Exception as error:  # a damaged header can be wrong in many ways
        what = "not a safetensors file, or its header is damaged"
        if len(raw) < length <= _LONGEST_HEADER:
            what = f"cut off in the safetensors header ({size} bytes)"
        raise InputError(f"{file}: {what}: download it again") from error
    missing = 8 + length + sum(entry.bytes for entry in tensors.values()) - size
    if missing > 0:
        raise InputError(f"{file}: cut off, {missing} bytes are missing: download it again")
    return tensors


def _entries(described: Mapping[str, Any], file: PurePath) -> Header:
    entries = {}
    for name, each in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = each["data_offsets"]
        shape = tuple(map(int, each["shape"]))
        entries[name] = Entry(name, each["dtype"], shape, end - start, file)
    return entries


def header_in(folder: Path | Repository, name: str) -> Header:
    """The header of a safetensors file of a folder or repository.

    Of a file on the Hub that is not in the cache, only the header is fetched.

    Raises:
        InputError: as in `read_header`, or the repository cannot be read.
    """
    if isinstance(folder, Path):
        return read_header(folder / name)
    if local := folder.cached(name):
        return read_header(local)
    described = folder.safetensors(name).tensors
    return _entries({name: vars(each) for name, each in described.items()}, folder / name)


def weight_headers(model_dir: Location) -> tuple[Header, ...]:
    """The headers of a checkpoint's weights: ``model.safetensors``, or the shards of its index.

    Raises:
        InputError: there are no safetensors weights, a shard is missing, or a file is damaged.
    """
    folder = located(model_dir)
    sharded = False
    if isinstance(folder, Repository):
        folder.file(CONFIG)  # all files of the present commit: those of an older one may be cached
        # The cache may hold an index without the note that there is no model.safetensors.
        sharded = bool(folder.cached(INDEX)) and not folder.cached(WEIGHTS)
    if not sharded and is_in(folder, WEIGHTS):
        return (header_in(folder, WEIGHTS),)
    index = file_in(folder, INDEX)
    if index is None:
        raise InputError(f"{folder}: no {WEIGHTS} and no {INDEX}")
    return tuple(header_in(folder, name) for name in _shards(index))


def check_weights(folder: Path | Repository) -> Header:
    """Refuse weights on this disk that are damaged, or of which only some shards are there.

    A folder without weights is fine, and so is a repository that is not downloaded.  Returns the
    tensors of all shards, or nothing if a shard is not on this disk.

    Raises:
        InputError: as in `weight_headers`.
    """
    find = partial(file_in, folder) if isinstance(folder, Path) else folder.cached
    index = None if find(WEIGHTS) else find(INDEX)
    names = [WEIGHTS] if index is None else _shards(index)
    here = [name for name in names if find(name)]
    read = names if here and isinstance(folder, Path) else here
    tensors = {n: entry for name in read for n, entry in header_in(folder, name).items()}
    return tensors if read == names else {}


def _shards(index: Path) -> list[str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise InputError(f"{index}: no weight_map")
    return sorted(set(shards.values()))


def adapter_header(adapter_dir: Location) -> Header:
    """The header of an adapter's ``adapter_model.safetensors``.

    Raises:
        InputError: there is no such file, or its header is damaged.
    """
    folder = located(adapter_dir)
    if not is_in(folder, ADAPTER_WEIGHTS):
        why = " (is it the folder of a model?)" if is_in(folder, CONFIG) else ""
        raise InputError(f"{folder}: no {ADAPTER_WEIGHTS}{why}")
    return header_in(folder, ADAPTER_WEIGHTS)
