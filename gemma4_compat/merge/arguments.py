"""Checks the arguments before a model is loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, reason
from ..model.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION_CONFIG,
    Entry,
    adapter_header,
    check_readable,
    existing_folder,
    exists,
    located,
    read_adapter_config,
    read_config,
    read_generation_config,
    read_json,
    refuse_cut_off,
    weight_headers,
)
from ..model.hub import Repository
from ..model.torch_build import cpu_only

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # and the bytes of an element
TOKENIZER_CONFIG = "tokenizer_config.json"
# The files of a repository to download.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "adapter_model.bin")
# Files to copy beside the weights, first from BASE and then from ADAPTER.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*processor_config.json", "additional_chat_templates",
)  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16", "BOOL", "I64")
_PICKLE = "adapter_model.bin"
_UNMERGEABLE = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")


def check_dtype(dtype: str) -> None:
    if dtype not in tuple(DTYPES):
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")


def check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not all(isinstance(text, str) for text in prompts):
        raise InputError("prompts must be a list of strings")
    if not all(text.strip() for text in prompts):
        raise InputError("a prompt is empty")


def check_device(device: str) -> str:
    """The device as torch spells it.  For the CPU, torch is not imported."""
    if device == "cpu":
        return device
    import torch

    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device {device!r}: unknown to torch; use cpu or cuda") from error
    if parsed.type == "cpu":
        return "cpu"
    if parsed.type == "meta":
        raise InputError("device 'meta': cannot compute; use cpu or cuda")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        why = cpu_only() or f"torch finds {count} CUDA GPUs"
        raise InputError(f"device {device!r}: {why}. To merge on the CPU: --device cpu")
    try:
        torch.zeros(1, device=parsed)
    except Exception as error:  # each type of device raises its own errors
        raise InputError(f"device {device!r}: torch cannot use it: {reason(error)}") from error
    return str(parsed)


def check_out(out: Path, force: bool) -> None:
    existing_folder(out.parent)
    try:
        out.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise InputError(f"{out}: cannot be used as OUT: {reason(error)}") from error
    if out.name in ("", "..") or _holds_current(out):
        raise InputError(f"{out}: is the current folder or a parent of it, and cannot be replaced")
    if os.path.islink(out) or (os.path.lexists(out) and not os.path.isdir(out)):
        raise InputError(f"{out}: exists and is not a folder")
    if os.path.lexists(out) and not force:
        raise InputError(f"{out}: exists already (--force replaces it)")
    if os.path.ismount(out):
        raise InputError(f"{out}: another disk is mounted there; name a folder inside it")


def _holds_current(folder: Path) -> bool:
    try:
        return is_inside(Path.cwd(), folder)
    except OSError:  # the current folder was deleted
        return False


def is_inside(path: Path, folder: Path) -> bool:
    """Whether the path is the folder or inside it, after links are resolved."""
    real = Path(os.path.realpath(path))
    return Path(os.path.realpath(folder)) in (real, *real.parents)


def locate(name: str | os.PathLike[str]) -> Path:
    """The local folder.  If ``name`` is a Hub id, it is downloaded, unless the cache has it."""
    folder = located(name)
    return folder.download(_FILES) if isinstance(folder, Repository) else folder


def check_base(folder: Path) -> None:
    """Refuse damaged files and quantised weights, even if the config names no quantisation."""
    read_config(folder)
    for header in weight_headers(folder):
        refuse_cut_off(header)
        for entry in header.tensors.values():
            if _is_quantised(entry):
                raise InputError(
                    f"{entry.file}: a quantised checkpoint ({entry.name} is {entry.dtype}); "
                    f"merging into it would not keep the adapter's outputs. Name the unquantised "
                    f"checkpoint instead"
                )
    if exists(folder / GENERATION_CONFIG):
        read_generation_config(folder / GENERATION_CONFIG)
    _check_companions(folder)


def _is_quantised(entry: Entry) -> bool:
    beside = entry.name.endswith((".SCB", ".absmax")) or ".quant_state." in entry.name
    return beside or entry.dtype not in _FLOATS


def check_adapter(folder: Path) -> None:
    """Refuse damaged files, and PEFT methods that change no weight."""
    if not exists(folder / ADAPTER_CONFIG):
        raise InputError(f"{folder}: no {ADAPTER_CONFIG}")
    file = folder / ADAPTER_CONFIG
    method = read_adapter_config(file).get("peft_type")
    if not method:
        raise InputError(f"{file}: not an adapter's config (no peft_type)")
    if method in _UNMERGEABLE:
        raise InputError(f"{folder}: a {method} adapter has no weights to merge")
    if exists(folder / _PICKLE) and not exists(folder / ADAPTER_WEIGHTS):
        check_readable(folder / _PICKLE)
    else:
        refuse_cut_off(adapter_header(folder))
    _check_companions(folder)


def companions(folder: Path) -> Iterator[Path]:
    """Files and folders to copy into the written checkpoint."""
    for pattern in _COMPANIONS:
        yield from sorted(folder.glob(pattern))


def _check_companions(folder: Path) -> None:
    for companion in companions(folder):
        for file in _files(companion):
            if file.suffix == ".json":
                read_json(file)
            else:
                check_readable(file)


def _files(path: Path) -> Iterable[Path]:
    if path.suffix or not path.is_dir():
        return (path,)
    return (below for below in path.rglob("*") if not below.is_dir())


def has_tokenizer(folder: Path) -> bool:
    return any(exists(folder / f"tokenizer.{end}") for end in ("json", "model"))


def check_room(base: Path, out: Path, dtype: str) -> None:
    """Refuse a disk without enough free space for the merged model."""
    elements = sum(
        entry.numel for header in weight_headers(base) for entry in header.tensors.values()
    )
    needed = elements * DTYPES[dtype]
    disk: Any = shutil.disk_usage(out.parent)
    if disk.total and disk.free < needed:  # some network disks report 0 of 0
        raise InputError(
            f"{out.parent}: {disk.free / 2**30:.1f} GiB are free, but the merged model needs "
            f"{needed / 2**30:.1f} GiB"
        )
