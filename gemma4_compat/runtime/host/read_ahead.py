"""Reads the layers that one loader loads from the disk into the page cache, ahead of time."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ...files.checkpoint import read_header
from ...model.parts import layer_of
from ...objects import NotCopied, attached
from .hooked import Way

logger = logging.getLogger(__name__)

#: Attribute of a weights loader.
_LAYERS = "_layers_on_disk"

#: How many threads read.
_READERS = 4

#: Bytes that a thread reads at a time.
_PIECE = 16 * 2**20

#: Reading ahead ends after so many such losses among the last layers.
_MAX_LOST = 3
_LAST_LAYERS = 8

#: Ranges with at most so many bytes between them are read as one.
_GAP = 64 * 1024


class Range(NamedTuple):
    """Consecutive bytes of a file."""

    file: str
    start: int
    stop: int

    def split(self) -> Iterator[Range]:
        """The pieces that the threads read."""
        for start in range(self.start, self.stop, _PIECE):
            yield Range(self.file, start, min(start + _PIECE, self.stop))


class Ahead(Way):
    """Layers on the disk are read ahead; see the patch ``disk_read_ahead``."""

    def add(self, hook: Any, module: Any) -> None:
        import torch
        from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset

        weights = hook.weights_map
        loader = weights.dataset if isinstance(weights, PrefixedDataset) else None
        if isinstance(module, torch.nn.Embedding):  # a forward may need only some of its rows
            return
        if isinstance(loader, OffloadedWeightsLoader) and loader.index:
            attached(loader, _LAYERS, lambda: DiskLayers(loader)).add(weights.prefix)

    def at_work(self, hooks: list[Any]) -> str | None:
        loaders = {id(each): each for each in (_layers_of(hook) for hook in hooks) if each}
        count = sum(len(stack) for each in loaders.values() for stack in each.stacks.values())
        return f"reads {count} layers on the disk ahead of time" if count else None

    def pre_forward(self, original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _layers_of(hook)
        if layers is not None and hook.offload:
            try:
                layers.enter(hook.weights_map.prefix)
            except Exception:
                if not layers.failed:
                    logger.info("a layer on the disk is not read ahead", exc_info=True)
                layers.failed = True
        return original(hook, module, *args, **kwargs)


def _layers_of(hook: Any) -> DiskLayers | None:
    return getattr(getattr(hook.weights_map, "dataset", None), _LAYERS, None)


class DiskLayers(NotCopied):
    """The layers whose weights one loader reads from the disk."""

    def __init__(self, loader: Any) -> None:
        self.index, self.folder = loader.index, loader.save_folder
        self.in_memory = loader.state_dict
        self.failed = False  # an error was logged
        self.stacks: dict[str, list[str]] = {}  # the layers with hooks, in the model's order
        self.begins: dict[str, str | None] = {}  # prefix -> the layer that begins with the module
        self.requested: list[str] = []  # the layer that runs, and the next one
        self.ranges: dict[str, list[Range]] | None = None
        self.pieces: deque[Range] = deque(maxlen=1024)  # not read yet
        self.readers: list[threading.Thread] = []
        # Whether each of the last layers left the page cache before it ran.
        self.lost: deque[bool] = deque(maxlen=_LAST_LAYERS)

    def add(self, prefix: str) -> None:
        """Register an offloaded module if it is in a layer."""
        found = layer_of(prefix)
        if found is not None:
            layers = self.stacks.setdefault(found[0], [])
            if found[1] not in layers:
                layers.append(found[1])

    def enter(self, prefix: str) -> None:
        """Read a layer and the next one if this module is the first one of the layer to run."""
        if prefix not in self.begins:
            found = layer_of(prefix)
            is_first = found is not None and found[1] not in self.begins.values()
            self.begins[prefix] = found[1] if found is not None and is_first else None
        layer = self.begins[prefix]
        if layer is None:
            return
        if layer in self.requested and self.is_lost(layer):
            self.requested = []
        if self.lost.count(True) >= _MAX_LOST:
            return
        wanted = [layer, self.after(layer)]
        new = [each for each in wanted if each not in self.requested]
        self.request(new)
        self.requested = wanted

    def after(self, layer: str) -> str:
        """The next layer of the same stack; after the last one, the first one."""
        layers = next(layers for layers in self.stacks.values() if layer in layers)
        return layers[(layers.index(layer) + 1) % len(layers)]

    def is_lost(self, layer: str) -> bool:
        """Whether the system removed a layer from the page cache after it was read."""
        if self.pieces or any(reader.is_alive() for reader in self.readers):
            return False
        lost = not _is_cached(self.ranges_of(layer))
        self.lost.append(lost)
        return lost

    def request(self, layers: list[str]) -> None:
        """Start to read these layers, unless they are in the page cache."""
        ranges = [self.ranges_of(layer) for layer in layers]
        missing = [each for of_layer in ranges if not _is_cached(of_layer) for each in of_layer]
        self.pieces.extend(piece for each in missing for piece in each.split())
        if not self.pieces:  # an interrupt may have left some
            return
        self.readers = [each for each in self.readers if each.is_alive()]
        for _ in range(_READERS - len(self.readers)):
            reader = threading.Thread(target=self.read, daemon=True)
            reader.start()
            self.readers.append(reader)

    def ranges_of(self, layer: str) -> list[Range]:
        """The bytes of a layer; empty if they were not found."""
        if self.ranges is None:
            self.ranges = self.located()
        return self.ranges.get(layer, [])

    def read(self) -> None:
        """Read pieces until there are no more."""
        while True:
            try:
                piece = self.pieces.popleft()
            except IndexError:
                return
            with suppress(OSError):
                _read(piece)

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
    sizes = {name: entry.bytes for name, entry in read_header(file).items()}
    start = os.path.getsize(file) - sum(sizes.values())
    bounds = pairwise(accumulate(sizes.values(), initial=start))
    return dict(zip(sizes, bounds, strict=True))


def _merged(ranges: list[Range]) -> Iterator[Range]:
    """These ranges in the order of the files; neighbours are one range."""
    file, start, stop = "", 0, 0
    for each in sorted(ranges):
        if each.file == file and each.start - stop <= _GAP:
            stop = each.stop
            continue
        if file:
            yield Range(file, start, stop)
        file, start, stop = each
    yield Range(file, start, stop)


def _is_cached(ranges: list[Range]) -> bool:
    """Whether a layer seems to be in the page cache, or cannot be read.

    One page of each piece of the largest range is tested.  A decode step can afford no more.
    """
    largest = max(ranges, key=lambda each: each.stop - each.start, default=None)
    if largest is None:
        return True
    try:
        with open(largest.file, "rb", buffering=0) as file:
            return all(_has_page(file.fileno(), piece.start) for piece in largest.split())
    except (OSError, ValueError):
        return True


def _has_page(descriptor: int, offset: int) -> bool:
    """Whether the page at this offset of a file is in the page cache."""
    import ctypes
    import mmap

    page = mmap.ALLOCATIONGRANULARITY
    start = offset - offset % page
    with mmap.mmap(descriptor, 1, flags=mmap.MAP_PRIVATE, offset=start) as mapped:
        # A variable for the buffer would keep the mapping from being closed.
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        state = ctypes.c_ubyte()
        failed = _libc().mincore(address, ctypes.c_size_t(1), ctypes.byref(state))
    return bool(failed or state.value & 1)


@cache
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def _read(piece: Range) -> None:
    """Read these bytes into the page cache."""
    with open(piece.file, "rb", buffering=0) as file, open(os.devnull, "wb") as nowhere:
        start = piece.start
        while start < piece.stop:
            count = os.sendfile(nowhere.fileno(), file.fileno(), start, piece.stop - start)
            if not count:  # the file is shorter now
                return
            start += count
