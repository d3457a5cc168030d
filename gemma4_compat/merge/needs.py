"""The memory and disk that a merge needs, said before any weights are loaded."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..model.files import weight_headers
from ..model.host_memory import available_memory, machine_memory
from ..text import size

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # in safetensors files
_FLOAT32 = 4


@dataclass(frozen=True)
class Needs:
    """The bytes that a merge holds at its peak.

    The model is held once: the adapter is merged in place, and the merged model is freed before
    the written one is loaded.  Logits and activations are a few percent more.

    Attributes:
        dtype: the dtype of the merge.
        weights: the base's parameters in this dtype.
        adapter: the parameters that PEFT adds.
        merging: the changes of the largest adapted layer, in float32 and in the merge's dtype.
        changed: the weights that the adapter changes, or those whose dtype differs from the file's
            if these are more.  On the CPU, the others are mapped from the file: when memory is
            short, the system reads them again.
    """

    dtype: str
    weights: int
    adapter: int
    merging: int
    changed: int

    @property
    def memory(self) -> int:
        return self.weights + self.adapter + self.merging

    def check(self, device: str, out: Path) -> str:
        """One line that says what is needed and what is free.

        Raises:
            InputError: the weights alone exceed all memory of the device.
        """
        free, total = _memory_of(device)
        must = self.changed if device == "cpu" else self.weights
        if must > total:
            others = "Use a machine with more memory"
            others += "" if device == "cpu" else ", or --device cpu"
            others += ", or --dtype bfloat16" if self.dtype == "float32" else ""
            raise InputError(
                f"device {device!r} has {size(int(total))} of memory, but must hold "
                f"{size(must)} of weights in {self.dtype}. {others}"
            )
        memory = "memory" if device == "cpu" else f"memory of {device}"
        disk = shutil.disk_usage(out.parent)
        line = (
            f"needs {size(self.memory)} of {memory} and {size(self.weights)} of disk in "
            f"{out.parent}; {_size(free)} and {_size(disk.free if disk.total else None)} are free."
        )
        if free is None or self.memory <= free:
            return line
        return f"{line} Close other programs: with too little memory, merging is slow or fails."


def _size(number: int | None) -> str:
    return "an unknown amount" if number is None else size(number)


def needs_of(base: Path, model: Any, weights: int, dtype: str) -> Needs:
    """The needs of a merge.  ``model`` is on meta, with its adapter; ``weights`` are its own."""
    import torch

    layers = [m.get_base_layer() for m in model.modules() if hasattr(m, "get_base_layer")]
    distinct = {id(weight): weight for layer in layers for weight in layer.parameters()}
    sizes = [weight.numel() for weight in distinct.values()]
    entries = [entry for header in weight_headers(base) for entry in header.tensors.values()]
    item = int(getattr(torch, dtype).itemsize)
    converted = sum(entry.numel * item for entry in entries if entry.dtype != _NAMES[dtype])
    return Needs(
        dtype=dtype,
        weights=weights,
        adapter=sum(p.numel() * p.element_size() for p in model.parameters()) - weights,
        merging=max(sizes, default=0) * (_FLOAT32 + item),
        changed=min(weights, max(sum(sizes) * item, converted)),
    )


def _memory_of(device: str) -> tuple[int | None, float]:
    """The free memory of the device, if known, and all of it; infinite where that can grow."""
    import torch

    if device == "cpu":
        import psutil  # accelerate requires it

        return available_memory(), machine_memory() + int(psutil.swap_memory().total)
    if not device.startswith("cuda"):
        return None, math.inf
    free, total = torch.cuda.mem_get_info(device)
    # On Windows the driver moves what does not fit to the CPU's memory.
    return int(free), math.inf if sys.platform == "win32" else int(total)
