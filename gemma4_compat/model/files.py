"""Reads the JSON files and safetensors headers of a checkpoint or an adapter.

This module reads every file that a user names, and refuses invalid ones.  It reads no tensor data,
so it does not refuse a file whose tensor data is cut off.  A checkpoint or an adapter is a local
folder or a repository on the Hub: `located` says which, and the other functions accept both.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, TypeVar

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
#: bytes, many times those of the longest tokenizer.json; a longer file is no config
_LONGEST_JSON = 2**29
#: bytes, many times those of the longest device map
_LONGEST_TEXT = 2**24
_POINTER = b"version https://git-lfs"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # the marks of UTF-32 begin like these
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
T = TypeVar("T")
#: what names a checkpoint or an adapter: a folder's path or a Hub id
Location = str | os.PathLike[str] | Repository
LOCATIONS = (str, os.PathLike, Repository)
_Kinds = Mapping[str, tuple[type | tuple[type, ...], type | tuple[type, ...]]]
_NUMBER = (int, float)
#: the type of each entry of a config, and the type of the values inside a list or dict
_CONFIG_KINDS: _Kinds = {
    "architectures": (list, str),
    "text_config": (dict, object),
    "vision_config": (dict, object),
    "audio_config": (dict, object),
    "quantization_config": (dict, object),
}
_TOKEN_KIND = ((int, list), int)
_GENERATION_KINDS: _Kinds = {
    "bos_token_id": _TOKEN_KIND,
    "eos_token_id": _TOKEN_KIND,
    "pad_token_id": _TOKEN_KIND,
}
_ADAPTER_KINDS: _Kinds = {
    "peft_type": (str, str),
    "task_type": (str, str),
    "base_model_name_or_path": (str, str),
    "r": (int, int),
    "lora_alpha": (_NUMBER, int),
    "lora_dropout": (_NUMBER, int),
    "rank_pattern": (dict, (int, list)),  # AdaLoRA has lists
    "alpha_pattern": (dict, _NUMBER),
    "target_modules": ((str, list), str),
    "target_parameters": ((str, list), str),
    "exclude_modules": ((str, list), str),
    "modules_to_save": (list, str),
    "trainable_token_indices": ((list, dict), (int, list)),
    "layers_to_transform": ((int, list), int),
    "layers_pattern": ((str, list), str),
    "bias": (str, str),
    "init_lora_weights": ((bool, str), str),
    "fan_in_fan_out": (bool, bool),
    "use_dora": (bool, bool),
    "use_rslora": (bool, bool),
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
        elements = 1
        for length in self.shape:
            elements *= length
        return elements


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    ``tensors`` maps names to entries, in the order of their data.  ``missing`` is the number of
    bytes by which a local file is too short for its tensors; 0 if it is complete.
    """

    file: PurePath
    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    missing: int


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
    found = None
    if isinstance(location, str) and not exists(Path(location)):
        found = repository(location)
    return location if found is None else found


def file_in(folder: Path | Repository, name: str) -> Path | None:
    """A small file of a folder or repository, or ``None``; one on the Hub is downloaded.

    Raises:
        InputError: the repository cannot be read.
    """
    if isinstance(folder, Repository):
        return folder.file(name)
    return folder / name if exists(folder / name) else None


def is_in(folder: Path | Repository, name: str) -> bool:
    """Whether a folder or repository has a file of this name; nothing is downloaded.

    Raises:
        InputError: the repository cannot be read.
    """
    return folder.contains(name) if isinstance(folder, Repository) else exists(folder / name)


def label(folder: Path | Repository, name: str) -> PurePath:
    """The name of a file in messages."""
    return folder / name if isinstance(folder, Path) else PurePosixPath(str(folder), name)


def has_safetensors(folder: Path | Repository) -> bool:
    """Whether the weights are safetensors files; assumed of a repository on the Hub."""
    return isinstance(folder, Repository) or any(folder.glob("*.safetensors"))


# -- the file system ----------------------------------------------------------------------------


def existing_folder(path: str | os.PathLike[str], kind: str = "folder") -> Path:
    """The folder as a ``Path``.

    Raises:
        InputError: it does not exist, cannot be read, or is not a folder.
    """
    folder = Path(path)
    if os.path.isdir(folder):
        return folder
    with _refusals(folder, kind):
        folder.stat()
    raise InputError(f"{folder}: not a folder")


def exists(file: Path) -> bool:
    """Whether anything of this name exists; a broken link counts."""
    return os.path.lexists(file)


@contextmanager
def _refusals(path: Path, kind: str = "file") -> Iterator[None]:
    """Turn the operating system's errors about a path into ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            raise InputError(f"{path}: no such {kind}") from None
        target = os.readlink(path)
        raise InputError(f"{path}: a link to {target}, which does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {why}") from error


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The opened regular file, and its size in bytes."""
    with _refusals(file):
        status = file.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{file}: a folder, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{file}: not a regular file")
        with file.open("rb") as opened:
            yield opened, status.st_size


def _refuse_pointer(file: PurePath, raw: bytes) -> None:
    if raw.startswith(_POINTER):
        raise InputError(f"{file}: a Git LFS pointer, not the file itself: run git lfs pull")


def check_readable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be read, is empty, or is a Git LFS pointer.

    Raises:
        InputError: the file is refused.
    """
    file = Path(path)
    with _opened(file) as (opened, _):
        raw = opened.read(len(_POINTER))
    if not raw:
        raise InputError(f"{file}: an empty file: download it again")
    _refuse_pointer(file, raw)


# -- text ---------------------------------------------------------------------------------------


def read_text(path: str | os.PathLike[str]) -> str:
    """A text file that the user wrote, in UTF-8, or in UTF-16 as Windows PowerShell writes it.

    Raises:
        InputError: the file cannot be read, or is not text.
    """
    file = Path(path)
    with _opened(file) as (opened, size):
        if size > _LONGEST_TEXT:
            raise InputError(f"{file}: not a text file: too large ({size} bytes)")
        return decoded_text(file, opened.read())


def decoded_text(source: str | os.PathLike[str], raw: bytes) -> str:
    """The text of these bytes, as in `read_text`; ``source`` is their name in messages.

    Raises:
        InputError: they are not text.
    """
    encoding = "utf-16" if raw.startswith(_UTF_16) else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(source)}: not a text in UTF-8: {error.reason}") from error


# -- JSON ---------------------------------------------------------------------------------------


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: the file cannot be read, or does not contain a JSON object.
    """
    file = Path(path)
    with _opened(file) as (opened, size):
        if size > _LONGEST_JSON:
            raise InputError(f"{file}: not JSON: too large ({size} bytes)")
        raw = opened.read()
    if not raw:
        raise InputError(f"{file}: an empty file, not JSON: download it again")
    _refuse_pointer(file, raw)
    try:
        content = json.loads(_decoded(file, raw))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a JSON object, but {_shown(content)}")
    return content


def _decoded(file: Path, raw: bytes) -> str:
    """Decode as transformers and PEFT do; ``json.loads`` alone would accept UTF-16, too."""
    saved = "save it as UTF-8 without a byte order mark"
    if raw.startswith(codecs.BOM_UTF8):
        raise InputError(f"{file}: not JSON: it starts with a byte order mark: {saved}")
    if raw.startswith(_UTF_16):
        raise InputError(f"{file}: not JSON in UTF-8, but in UTF-16: {saved}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {error.start} is {raw[error.start]:#04x}"
        raise InputError(f"{file}: not JSON: not UTF-8 ({at})") from error


def _shown(value: Any) -> str:
    """A value of a JSON file, as text for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_kinds(file: Path, content: Mapping[str, Any], kinds: _Kinds) -> None:
    """Refuse entries of other types than transformers and PEFT write; null or absent ones pass."""
    for name, (kind, inside) in kinds.items():
        value = content.get(name)
        items = value if isinstance(value, list) else []
        items = list(value.values()) if isinstance(value, dict) else items
        wrong = not isinstance(value, kind) or not all(isinstance(each, inside) for each in items)
        if value is not None and wrong:
            raise InputError(f"{file}: {name} cannot be {_shown(value)}")


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
    _check_kinds(file, config, _CONFIG_KINDS)
    return config


def read_generation_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A ``generation_config.json`` with valid token ids.

    Raises:
        InputError: the file cannot be read, or is no such config.
    """
    file = Path(path)
    config = read_json(file)
    _check_kinds(file, config, _GENERATION_KINDS)
    return config


def read_adapter_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """An ``adapter_config.json``; the entries that we use have the types that PEFT writes.

    Raises:
        InputError: the file cannot be read, or an entry has another type.
    """
    file = Path(path)
    config = read_json(file)
    _check_kinds(file, config, _ADAPTER_KINDS)
    return config


# -- safetensors --------------------------------------------------------------------------------


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file; its tensor data is not read.

    Raises:
        InputError: the file cannot be read, its header is damaged, or extra bytes follow the data.
    """
    file = Path(path)
    with _opened(file) as (opened, size):
        return _header(file, opened, size)


def header_in(folder: Path | Repository, name: str) -> Header:
    """The header of a safetensors file of a folder or repository.

    Of a file on the Hub that is not in the cache, only the header is fetched.

    Raises:
        InputError: as in `read_header`, or the repository cannot be read.
    """
    if isinstance(folder, Path):
        return read_header(folder / name)
    cached = folder.cached(name)
    if cached is not None:
        return read_header(cached)
    file, found = label(folder, name), folder.safetensors(name)
    placed = sorted((each.data_offsets, name) for name, each in found.tensors.items())
    tensors = {
        name: Entry(name, found.tensors[name].dtype, tuple(found.tensors[name].shape), b - a, file)
        for (a, b), name in placed
    }
    return Header(file, tensors, found.metadata, 0)


def _header(file: PurePath, opened: BinaryIO, size: int) -> Header:
    start = opened.read(8)
    length = int.from_bytes(start, "little")
    readable = len(start) == 8 and length <= min(size - 8, _LONGEST_HEADER)
    raw = opened.read(length) if readable else start + opened.read(len(_POINTER))
    _refuse_pointer(file, raw)
    if not readable:
        if len(start) < 8 or length <= _LONGEST_HEADER:
            raise InputError(
                f"{file}: cut off in the safetensors header ({size} bytes): download it again"
            )
        raise InputError(f"{file}: not a safetensors file")
    try:
        content = json.loads(raw.decode("utf-8"))
        metadata = content.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("a metadata value is not a string")
        placed = sorted(_placed(name, described, file) for name, described in content.items())
        end = 0
        for (first, last), _ in placed:
            if first != end:
                raise ValueError(f"data starts at {first}, not at {end}")
            end = last
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: not a safetensors file, or its header is damaged: download it again"
        ) from error
    if size > 8 + length + end:
        raise InputError(f"{file}: {size - 8 - length - end} extra bytes follow the last tensor")
    tensors = {name: entry for _, (name, entry) in placed}
    return Header(file, tensors, metadata, 8 + length + end - size)


def _placed(
    name: str, described: Mapping[str, Any], file: PurePath
) -> tuple[tuple[int, int], tuple[str, Entry]]:
    """The offsets at which a tensor's data begins and ends, its name, and its entry."""
    dtype, shape, (start, end) = (described[key] for key in ("dtype", "shape", "data_offsets"))
    numbers = (*shape, start, end - start)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise TypeError(f"{name}: not a tensor")
    entry = Entry(name, dtype, tuple(shape), end - start, file)
    bits = _ITEM_BITS.get(dtype)  # the size of an unknown dtype is not checked
    if bits is not None and entry.bytes * 8 != entry.numel * bits:
        raise ValueError(f"{name}: {entry.bytes} bytes do not hold {shape} of {dtype}")
    return (start, end), (name, entry)


def weight_headers(model_dir: Location) -> tuple[Header, ...]:
    """The headers of a checkpoint's weights: ``model.safetensors``, or the shards of its index.

    Raises:
        InputError: there are no safetensors weights, a file is damaged, or a shard that the index
            names is missing, outside the folder, or lacks a tensor.
    """
    folder = _at_one_commit(model_dir, CONFIG)
    if _in_one_file(folder):
        return (header_in(folder, WEIGHTS),)
    index = file_in(folder, INDEX)
    if index is None:
        other = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")
                 if is_in(folder, name)]  # fmt: skip
        only = f" (only {other[0]}, which is not supported)" if other else ""
        raise InputError(f"{folder}: no {WEIGHTS} and no {INDEX}{only}")
    headers = []
    for shard, tensors in _shards(index).items():
        try:
            header = header_in(folder, shard)
        except InputError as error:
            raise type(error)(f"{error} (a shard that {INDEX} names)") from error
        for tensor in tensors:
            if tensor not in header.tensors:
                raise InputError(f"{header.file}: no tensor {tensor}, which {INDEX} lists")
        headers.append(header)
    return tuple(headers)


def _at_one_commit(location: Location, config: str) -> Path | Repository:
    """The folder, or the repository at the present commit: files of an older one may be cached."""
    folder = located(location)
    if isinstance(folder, Repository):
        folder.file(config)
    return folder


def _in_one_file(folder: Path | Repository) -> bool:
    # The cache may hold an index without the note that the repository has no model.safetensors.
    if isinstance(folder, Repository) and folder.cached(INDEX) and not folder.cached(WEIGHTS):
        return False
    return is_in(folder, WEIGHTS)


def _shards(index: Path) -> dict[str, list[str]]:
    """The names of the tensors in each shard, by the shard's path inside the index's folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: no weight_map")
    if not weight_map:
        raise InputError(f"{index}: its weight_map is empty")
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InputError(f"{index}: the shard of {tensor} cannot be {_shown(shard)}")
        # Links inside the folder are followed: the Hub's cache consists of them.
        if _leaves_folder(shard):
            raise InputError(f"{index}: names a shard outside its folder: {shard}")
        shards.setdefault(shard, []).append(tensor)
    return dict(sorted(shards.items()))


def _leaves_folder(path: str) -> bool:
    return bool(Path(path).anchor) or ".." in Path(path).parts  # on Windows, "C:x" has an anchor


def adapter_header(adapter_dir: Location) -> Header:
    """The header of an adapter's ``adapter_model.safetensors``.

    Raises:
        InputError: there is no such file, or its header is damaged.
    """
    folder = _at_one_commit(adapter_dir, ADAPTER_CONFIG)
    if not is_in(folder, ADAPTER_WEIGHTS):
        raise InputError(f"{folder}: no {ADAPTER_WEIGHTS}")
    return header_in(folder, ADAPTER_WEIGHTS)


def refuse_cut_off(header: Header) -> None:
    """Refuse a file that is too short for its tensors.

    Raises:
        InputError: the file is refused.
    """
    if header.missing > 0:
        raise InputError(
            f"{header.file}: cut off, {header.missing} bytes are missing: download it again"
        )
