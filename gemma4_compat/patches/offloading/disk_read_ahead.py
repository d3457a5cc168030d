"""Layers on the disk are read tensor by tensor, each at the moment that it is needed.

accelerate maps the file of a tensor into memory when the module with the tensor is about to run.
The system then reads the file in small pieces, each when the copy to the execution device reaches
it.  A fast disk has one or two such requests at a time, and is idle while the model computes.

The fix asks the system to read a layer on the disk, and the one after it, when the first module of
the layer is about to run.  All requests of a layer are sent at once, in the order of the file, and
the system adds the bytes to its page cache.  accelerate then loads the same tensors from the same
files as before, and finds them in memory.  Bytes that are in the page cache are not read again.
After the last layer comes the first one, because the next decode step begins with it.

An error is ignored: accelerate raises its own when it cannot load a tensor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, wraps
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...engine import Finding, Kind, Patch, broken, fixed
from ...model.files import read_header
from ...model.parts import layer_of
from .._code import mentions
from .._not_copied import NotCopied, attached

PATCH = Patch(
    name="disk_read_ahead",
    kind=Kind.SPEED,
    symptom="layers on the disk are read while the model waits, slower than the disk could",
    affects=("transformers", "accelerate"),
    changes=(
        "When a layer on the disk is about to run, AlignDevicesHook lets Linux read that layer and "
        "the next one into the page cache."
    ),
    note="Linux only: other systems have no posix_fadvise.",
    unreported="Only slow, not wrong; no report is known upstream.",
)

#: Attribute of a weights loader.
_LAYERS = "_layers_on_disk"

#: Bytes that any file system reads for one request.
_REQUEST = 64 * 1024


@PATCH.probe
def tensors_are_read_when_needed() -> Finding:
    """Look whether accelerate advises the system about its reads."""
    import inspect

    from accelerate.hooks import AlignDevicesHook
    from accelerate.utils.offload import OffloadedWeightsLoader

    if not hasattr(os, "posix_fadvise"):
        return fixed("this system has no posix_fadvise")
    functions = (AlignDevicesHook.pre_forward, OffloadedWeightsLoader.__getitem__)
    if any(mentions(inspect.unwrap(each).__code__, "advise") for each in functions):
        return fixed("accelerate advises the system about its reads")
    return broken()


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.init_hook")
def align_devices_hook_init_hook(original: Any) -> Any:
    import torch

    @wraps(original)
    def init_hook(self: Any, module: Any) -> Any:
        module = original(self, module)
        loader = _loader(self) if self.offload else None
        # A forward may need only some rows of an embedding.
        if loader is not None and loader.index and not isinstance(module, torch.nn.Embedding):
            attached(loader, _LAYERS, lambda: Layers(loader)).add(self.weights_map.prefix)
        return module

    return init_hook


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.pre_forward")
def align_devices_hook_pre_forward(original: Any) -> Any:
    import torch

    @wraps(original)
    def pre_forward(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.offload and not torch.compiler.is_compiling():
            loader = _loader(self)
            layers = None if loader is None else vars(loader).get(_LAYERS)
            if layers is not None:
                layers.enter(self.weights_map.prefix)
        return original(self, module, *args, **kwargs)

    return pre_forward


def _loader(hook: Any) -> Any | None:
    """The object that loads a hook's weights from the disk, or ``None``."""
    from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset

    weights = hook.weights_map
    loader = weights.dataset if isinstance(weights, PrefixedDataset) else None
    return loader if isinstance(loader, OffloadedWeightsLoader) else None


class Range(NamedTuple):
    """Consecutive bytes of a file."""

    file: str
    start: int
    stop: int


class Layers(NotCopied):
    """The layers whose weights one loader reads from the disk."""

    def __init__(self, loader: Any) -> None:
        self.index, self.folder = loader.index, loader.save_folder
        self.in_memory = loader.state_dict
        self.stacks: dict[str, list[str]] = {}  # the layers with hooks, in the model's order
        self.begins: dict[str, str] = {}  # prefix of the first module to run -> its layer
        self.started: set[str] = set()  # layers whose first module to run is known
        self.requested: list[str] = []  # the layer that runs, and the next one
        self.requesting = threading.Lock()  # held for one layer after the other
        self.ranges: dict[str, list[Range]] | None = None

    def add(self, prefix: str) -> None:
        """Register an offloaded module if it is in a layer."""
        found = layer_of(prefix)
        if found is not None:
            layers = self.stacks.setdefault(found[0], [])
            if found[1] not in layers:
                layers.append(found[1])

    def enter(self, prefix: str) -> None:
        """Request a layer and the next one if this module is the first one of the layer to run."""
        layer = self.begins.get(prefix)
        if layer is None:
            found = layer_of(prefix)
            if found is None or found[1] in self.started:
                return
            layer = self.begins[prefix] = found[1]
            self.started.add(layer)
        wanted = [layer, self.after(layer)]
        new = [each for each in wanted if each not in self.requested]
        self.requested = wanted
        with suppress(RuntimeError):  # the system or the interpreter starts no more threads
            threading.Thread(target=self.request, args=(new,), daemon=True).start()

    def after(self, layer: str) -> str:
        """The next layer of the same stack; after the last one, the first one."""
        layers = next(layers for layers in self.stacks.values() if layer in layers)
        return layers[(layers.index(layer) + 1) % len(layers)]

    def request(self, layers: list[str]) -> None:
        """Request the bytes of these layers.  The system may make a request wait for the disk."""
        with self.requesting:
            if self.ranges is None:
                self.ranges = self.located()
            for each in (each for layer in layers for each in self.ranges.get(layer, ())):
                with suppress(OSError):
                    _request(each)

    def located(self) -> dict[str, list[Range]]:
        """The bytes of each layer, in the order of the files."""
        ranges: dict[str, list[Range]] = {}
        offsets: dict[str, dict[str, tuple[int, int]]] = {}
        for name, entry in self.index.items():
            layer = layer_of(name)
            if layer is None or name in self.in_memory:
                continue
            with suppress(Exception):  # accelerate raises its own error
                ranges.setdefault(layer[1], []).append(self.locate(name, entry, offsets))
        return {layer: list(_merged(parts)) for layer, parts in ranges.items()}

    def locate(self, name: str, entry: Any, offsets: dict[str, dict[str, Any]]) -> Range:
        """The bytes of a tensor, in the checkpoint or in the offload folder."""
        file = entry.get("safetensors_file")
        if file is None:
            file = os.path.join(self.folder, f"{name}.dat")
            return Range(file, 0, os.path.getsize(file))
        if file not in offsets:
            offsets[file] = {}  # a file that cannot be read is tried once
            offsets[file] = _offsets(file)
        return Range(file, *offsets[file][entry.get("weight_name", name)])


def _offsets(file: str) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends in a safetensors file."""
    header = read_header(file)
    sizes = {name: entry.bytes for name, entry in header.tensors.items()}
    start = os.path.getsize(file) + header.missing - sum(sizes.values())
    bounds = pairwise(accumulate(sizes.values(), initial=start))
    return dict(zip(sizes, bounds, strict=True))


def _merged(ranges: list[Range]) -> Iterator[Range]:
    """These ranges in the order of the files; neighbours are one range."""
    file, start, stop = "", 0, 0
    for each in sorted(ranges):
        if each.file == file and each.start - stop < _REQUEST:
            stop = each.stop
            continue
        if file:
            yield Range(file, start, stop)
        file, start, stop = each
    yield Range(file, start, stop)


def _request(wanted: Range) -> None:
    """Let the system read these bytes into its page cache."""
    descriptor = os.open(wanted.file, os.O_RDONLY)
    try:
        size = _request_size(os.fstat(descriptor).st_dev)
        for start in range(wanted.start, wanted.stop, size):
            length = min(size, wanted.stop - start)
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


@cache
def _request_size(device: int) -> int:
    """Bytes to request at a time: Linux ignores all beyond a limit, which depends on the disk."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for folder in (f"/sys/class/bdi/{number}", f"/sys/dev/block/{number}/../bdi"):
        with suppress(OSError, ValueError):
            return 1024 * int(Path(folder, "read_ahead_kb").read_text()) or _REQUEST
    return _REQUEST
