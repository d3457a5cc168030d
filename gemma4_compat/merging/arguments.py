"""Checks the arguments before a model is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..errors import InputError, failures_of
from ..files.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_header,
    existing_folder,
    file_in,
    is_in,
    located,
    read_adapter_config,
    read_config,
    weight_headers,
)
from ..files.hub import Repository
from ..results.text import size

# The files of a repository to download.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "adapter_model.bin")
_FLOATS = ("F64", "F32", "F16", "BF16", "BOOL", "I64")
_UNMERGEABLE = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")


def check_device(device: str) -> str:
    """The device as torch spells it.  For the CPU, torch is not imported."""
    if device == "cpu":
        return device
    import torch

    with failures_of(f"device {device!r}: torch cannot use it; --device cpu merges on the CPU"):
        tensor = torch.zeros(1, device=device)
        tensor.item()  # the meta device cannot compute
        return str(tensor.device)


def check_out(out: Path, force: bool) -> None:
    """Refuse an OUT that exists, without ``force``, and one that must not be replaced."""
    existing_folder(out.parent)
    if out.name == ".." or is_inside(Path.cwd(), out):
        raise InputError(f"{out}: is the current folder or a parent of it, and cannot be replaced")
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir()):
        raise InputError(f"{out}: exists and is not a folder")
    if os.path.lexists(out) and not force:
        raise InputError(f"{out}: exists already (--force replaces it)")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether the path is the folder or inside it, after links are resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def locate(name: str | os.PathLike[str]) -> Path:
    """The local folder.  If ``name`` is a Hub id, it is downloaded, unless the cache has it."""
    folder = located(name)
    return folder.download(_FILES) if isinstance(folder, Repository) else folder


def check_base(folder: Path) -> int:
    """Refuse damaged files and quantized weights, even if the config names no quantization.

    Returns the number of elements of all tensors.
    """
    read_config(folder)
    elements = 0
    for entry in (entry for header in weight_headers(folder) for entry in header.values()):
        elements += entry.numel
        beside = entry.name.endswith((".SCB", ".absmax")) or ".quant_state." in entry.name
        if beside or entry.dtype not in _FLOATS:
            raise InputError(
                f"{entry.file}: a quantized checkpoint ({entry.name} is {entry.dtype}); merging "
                f"into it would not keep the adapter's outputs. Name the unquantized checkpoint "
                f"instead"
            )
    return elements


def check_adapter(folder: Path) -> None:
    """Refuse damaged files, and PEFT methods that change no weight."""
    file = file_in(folder, ADAPTER_CONFIG)
    if file is None:
        raise InputError(f"{folder}: no {ADAPTER_CONFIG}")
    method = read_adapter_config(file).get("peft_type")
    if not method:
        raise InputError(f"{file}: not an adapter's config (no peft_type)")
    if method in _UNMERGEABLE:
        raise InputError(f"{folder}: a {method} adapter has no weights to merge")
    if is_in(folder, ADAPTER_WEIGHTS) or not is_in(folder, "adapter_model.bin"):
        adapter_header(folder)


def check_room(elements: int, out: Path) -> None:
    """Refuse a disk without enough free space for the merged model."""
    needed, disk = 2 * elements, shutil.disk_usage(out.parent)
    if disk.total and disk.free < needed:  # some network disks report 0 of 0
        free, needs = size(disk.free), size(needed)
        raise InputError(f"{out.parent}: {free} are free, but the merged model needs {needs}")
