"""What a device map would do to a model, before anything is loaded.

``check_device_map`` is also the command ``gemma4-compat map MODEL_DIR --map JSON``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import sizes
from ..engine.gate import Outcome, evaluate, installed_version
from ..engine.status import State
from ..errors import InputError
from ..model.files import existing_folder, read_config
from ..patches.device_map_keys import _closest, _left_out
from ..patches.root_device_map import _differs
from ..sizes import TensorSize
from ._text import plural, size, table, wrap

OFFLOADED = ("cpu", "disk")
LEVELS = ("error", "warning", "handled", "note")
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class UnknownKey:
    """An entry that names no module, parameter or buffer.

    ``closest`` is the module that may be meant, ``closest_on`` where the map puts that one.
    ``left_out``: the class has such a part, but this checkpoint goes without it.  While loading,
    the patch ``device_map_keys`` warns of the others.
    """

    key: str
    device: int | str
    closest: str | None
    closest_on: str | None
    left_out: bool


@dataclass(frozen=True)
class Placed:
    """What lands under an entry of the map, or on a device: bytes, by quantisation."""

    name: str
    device: str
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Trap:
    """Something that the map runs into.

    ``level`` is "error" (loading or running fails), "warning", "handled" (by ``patch``, which is
    in place) or "note".  ``patch`` is the patch of ours that is about it, if there is one, and
    ``state`` that patch's state in this process.
    """

    name: str
    level: str
    text: str
    patch: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class DeviceMapCheck:
    """What a device map does.  All sizes are in bytes, by "nf4", "int8" and "bf16".

    ``entries`` are in the map's order, ``devices`` say what rests where once the model is loaded.
    ``saves`` is what offloading saves on the GPU.  ``uncovered`` are the highest modules that no
    entry places.
    """

    model: str
    architecture: str
    device_map: Mapping[str, int | str]
    unknown: tuple[UnknownKey, ...]
    uncovered: tuple[str, ...]
    entries: tuple[Placed, ...]
    devices: tuple[Placed, ...]
    saves: Mapping[str, int]
    traps: tuple[Trap, ...]

    @property
    def ok(self) -> bool:
        """Nothing is unknown or uncovered, and no trap is open."""
        open_traps = (trap for trap in self.traps if trap.level in ("error", "warning"))
        unknown = any(not each.left_out for each in self.unknown)
        return not unknown and not self.uncovered and not any(open_traps)

    def as_dict(self) -> dict[str, Any]:
        """The same for programs: plain values."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def check_device_map(
    model: Any,
    device_map: Mapping[str, Any],
    *,
    quantization_config: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> DeviceMapCheck:
    """Check a device map against a model's module names and sizes; no weight is read.

    Args:
        model: a folder with ``config.json``, or a transformers or PEFT model, loaded or not.  A
            map is for the base model's ``from_pretrained``: PEFT ignores a ``device_map`` (and
            without ``peft_redispatch`` it places the whole model anew), because the names in it
            are those of the base model and the adapter follows the base layers.
        device_map: names of modules, and devices: GPU numbers, "cuda:1", "cpu", "disk" or a
            ``torch.device``.
        quantization_config: the ``BitsAndBytesConfig`` that the model is to be loaded with, to
            check that it allows the map.
        offload_folder: as given to ``from_pretrained``.

    Raises:
        InputError: no such folder, or its ``config.json`` is missing or damaged.
        InputError: the installed transformers does not know the model, or the map is none.
    """
    given = _checked(device_map)
    with _folder(model) as (name, folder, found):
        view = _View(folder, given, _quants())
        return DeviceMapCheck(
            model=name,
            architecture=type(view.model).__name__,
            device_map=given,
            unknown=tuple(view.unknown()),
            uncovered=tuple(view.uncovered()),
            entries=tuple(view.entries()),
            devices=tuple(view.devices()),
            saves=view.saves(),
            traps=tuple(view.traps(found, quantization_config, offload_folder)),
        )


@dataclass(frozen=True)
class Described:
    """A model's class, and its bytes by quantisation and part."""

    architecture: str
    bytes: Mapping[str, Mapping[str, int]]


def describe(model: Any) -> Described:
    """What a model takes whole; raises as `check_device_map` does."""
    with _folder(model) as (_, folder, _found):
        view = _View(folder, {"": 0}, _quants())
    totals: dict[str, dict[str, int]] = {}
    for quant, tensors in view.whole.items():
        parts = totals.setdefault(quant, {})
        for tensor in tensors:
            parts[tensor.part] = parts.get(tensor.part, 0) + tensor.bytes
    return Described(type(view.model).__name__, totals)


def parse_map(text: str) -> dict[str, int | str]:
    """A device map from JSON: ``{"model.vision_tower": "cpu", "": 0}``.

    Raises:
        InputError: not JSON, not an object, or with values that are no devices.
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        hint = "; write it in single quotes, its names in double quotes" if "'" in text else ""
        raise InputError(f"{text!r} is not JSON: {error}{hint}") from error
    return _checked(found)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'the entry "{twice}" is there twice')
    return dict(pairs)


def _checked(device_map: Any) -> dict[str, int | str]:
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        raise InputError(f"{device_map!r} is no map yet: from_pretrained makes one of it")
    if not isinstance(device_map, Mapping):
        raise InputError('a device map is an object such as {"model.vision_tower": "cpu", "": 0}')
    if not device_map:
        raise InputError("the device map is empty")
    return {_name(key): _device(key, value) for key, value in device_map.items()}


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise InputError(f"the device map names {key!r}: names of modules are text")


def _device(key: str, value: Any) -> int | str:
    import torch

    if isinstance(value, torch.device):
        value = str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if value in OFFLOADED:
        return str(value)
    try:
        if isinstance(value, str) and torch.device(value).type not in ("meta", "cpu"):
            return value
    except RuntimeError:
        pass
    raise InputError(f'"{key}": {value!r} is no device: write 0, "cuda:1", "cpu" or "disk"')


@contextlib.contextmanager
def _folder(model: Any) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """What to call the model, a folder that describes it unquantised, and what was found there."""
    if isinstance(model, (str, os.PathLike)):
        found = read_config(model)
        if "quantization_config" not in found:
            yield os.fspath(model), existing_folder(model), {"folder": Path(model)}
            return
        name, quantised = os.fspath(model), found.pop("quantization_config")
        kept = {"folder": Path(model), "quantised": quantised}
    else:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not hasattr(getattr(base, "config", None), "to_json_string"):
            raise InputError(f"{type(model).__name__} is neither a folder nor a transformers model")
        found = json.loads(base.config.to_json_string())
        found.pop("quantization_config", None)
        found["architectures"] = [type(base).__name__]
        name, kept = type(base).__name__, {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(found), encoding="utf-8")
        yield name, Path(folder), kept


def _quants() -> list[str]:
    """bitsandbytes' own layers are needed to tell what they hold."""
    import importlib.metadata

    try:
        for name in ("bitsandbytes", "accelerate"):
            installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        return ["bf16"]
    return list(sizes.QUANTS)


class _View:
    """A model under a map."""

    def __init__(self, folder: Path, given: dict[str, int | str], quants: list[str]) -> None:
        self.map, self.quants = given, quants
        self.model = sizes.meta_model(folder)
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        #: names of parameters: the tied one, and the one that it is
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        devices = set(given.values())
        gpus = [device for device in given.values() if device not in OFFLOADED]
        #: where what is offloaded computes, and with it stay the buffers of offloaded modules
        self.main: int | str = min(gpus, key=_order) if gpus else "cpu"
        self.offloads = {"cpu", "disk"} & devices if gpus else {"disk"} & devices
        #: transformers refuses a quantised model on such a map without the offload flag
        self.splits = bool({"cpu", "disk"} & devices) and devices != {"cpu"}
        self.tensors: dict[str, tuple[TensorSize, ...]] = {}
        self.whole: dict[str, tuple[TensorSize, ...]] = {}
        #: by quantisation: linear layers that are not quantised for the map's sake
        self.kept: dict[str, list[str]] = {}
        for quant in quants:
            model = self.model
            if quant != "bf16":
                model = sizes.meta_model(folder, sizes.bnb_config(quant))
            self.whole[quant] = self.tensors[quant] = sizes.tensor_sizes(model)
            if self.splits and quant != "bf16":
                config = sizes.bnb_config(quant, offload=True)
                placed = sizes.meta_model(folder, config, given)
                self.tensors[quant] = sizes.tensor_sizes(placed)
                self.kept[quant] = sorted(_quantised(model) - _quantised(placed))

    # -- names and devices

    def entry(self, name: str) -> str | None:
        """The entry that places a module or tensor: the longest one that covers it."""
        found = [key for key in self.map if not key or sizes.is_under(name, [key])]
        return max(found, key=len, default=None)

    def rests_on(self, name: str) -> int | str:
        entry = self.entry(name)
        return "cpu" if entry is None else self.map[entry]

    def computes_on(self, name: str) -> int | str:
        device = self.rests_on(name)
        return self.main if device in self.offloads else device

    def is_offloaded(self, name: str) -> bool:
        entry = self.entry(name)
        return entry is not None and self.map[entry] in self.offloads

    def holds(self, tensor: TensorSize) -> int | str:
        """Where a tensor is once the model is loaded; accelerate does not offload buffers.

        Tied weights are one tensor, on a GPU if either of them is.
        """
        if tensor.buffer:
            return self.computes_on(tensor.name)
        names = [tensor.name, *(t for t, source in self.tied.items() if source == tensor.name)]
        resident = [name for name in names if not self.is_offloaded(name)]
        return self.rests_on((resident or names)[0])

    # -- what is asked

    def unknown(self) -> Iterator[UnknownKey]:
        known = {
            *self.modules,
            *(name for name, _ in self.model.named_parameters(remove_duplicate=False)),
            *(name for name, _ in self.model.named_buffers(remove_duplicate=False)),
        }
        for key, device in self.map.items():
            if key not in known:
                closest = _closest(key, list(self.modules))
                there = None if closest is None else _label(self.rests_on(closest))
                yield UnknownKey(key, device, closest, there, _left_out(self.model, key))

    def uncovered(self) -> Iterator[str]:
        """The highest modules of which nothing is covered, and single tensors."""
        if "" in self.map:
            return
        bare = {t.name for t in self.whole["bf16"] if self.entry(t.name) is None}
        covered = [t.name for t in self.whole["bf16"] if t.name not in bare]
        seen: list[str] = []
        for name in [*self.modules, *bare]:
            if not name or sizes.is_under(name, seen):
                continue
            if any(sizes.is_under(other, [name]) for other in covered):
                continue
            if any(sizes.is_under(other, [name]) for other in bare):
                seen.append(name)
        yield from seen

    def entries(self) -> Iterator[Placed]:
        for key, device in self.map.items():
            found = {
                quant: sum(t.bytes for t in tensors if self.entry(t.name) == key)
                for quant, tensors in self.tensors.items()
            }
            yield Placed(key, _label(device), found)

    def devices(self) -> Iterator[Placed]:
        totals: dict[int | str, dict[str, int]] = {}
        for quant, tensors in self.tensors.items():
            for tensor in tensors:
                device = self.holds(tensor)
                by_quant = totals.setdefault(device, dict.fromkeys(self.quants, 0))
                by_quant[quant] += tensor.bytes if device in OFFLOADED else tensor.on_cuda
        for device in sorted(totals, key=_order):
            yield Placed(_label(device), _label(device), totals[device])

    def saves(self) -> dict[str, int]:
        """Against the same map with the main device in place of "cpu" and "disk"."""
        if self.main == "cpu":
            return dict.fromkeys(self.quants, 0)
        saved = {}
        for quant in self.quants:
            here = [t.on_cuda for t in self.tensors[quant] if self.holds(t) not in OFFLOADED]
            saved[quant] = sum(t.on_cuda for t in self.whole[quant]) - sum(here)
        return saved

    # -- traps

    def traps(self, found: dict[str, Any], config: Any, folder: Any) -> Iterator[Trap]:
        yield from self._not_covered()
        yield from self._refused(found, config)
        yield from self._disk(found.get("folder"), folder)
        yield from self._no_such_gpu()
        yield from self._covering_entry()
        yield from self._embeddings()
        yield from self._tied()
        yield from self._split_layers()
        yield from self._shared_kv()
        yield from self._second_gpu()
        yield from self._decoder_layers()
        yield from self._not_quantised()
        if self.offloads:
            text = (
                "an adapter loaded with PeftModel.from_pretrained leaves this placement alone; a "
                "device_map given to PEFT is ignored"
            )
            yield from _about("adapters", text, "peft_redispatch")

    def _not_covered(self) -> Iterator[Trap]:
        if not any(self.uncovered()):
            return
        if len(set(self.map.values())) > 1 or "disk" in self.map.values():
            text = (
                "from_pretrained fails where modules have no entry: 'The device_map provided does "
                'not give any device for the following parameters\'; add one for ""'
            )
            yield Trap("uncovered", "error", text)
        elif self.main != "cpu":
            text = (
                "modules without an entry are left on the CPU and compute there, without a word "
                'and without hooks between the devices; add an entry for ""'
            )
            yield Trap("uncovered", "error", text)

    def _refused(self, found: dict[str, Any], config: Any) -> Iterator[Trap]:
        if not self.splits:
            return
        flag = "llm_int8_enable_fp32_cpu_offload"
        quantised = found.get("quantised")
        if quantised is not None:
            # Its own config counts, whatever else is given.
            if isinstance(quantised, dict) and quantised.get(flag):
                text = (
                    "the checkpoint is quantised already: what the map offloads becomes layers in "
                    "float, which its weights do not fit (size mismatch)"
                )
            else:
                text = (
                    f"the checkpoint is quantised already, its config refuses this map: no {flag}"
                )
            text += ". Offload of the checkpoint that it was made from"
            yield Trap("quantised_checkpoint", "error", text)
            return
        if config is None:
            text = f"in 4 or 8 bit from_pretrained wants {flag}=True for this map"
            yield Trap("offload_flag", "note", text)
        elif not getattr(config, flag, False):
            text = f"from_pretrained refuses this map without {flag}=True in quantization_config"
            yield Trap("offload_flag", "error", text)

    def _disk(self, checkpoint: Path | None, folder: Any) -> Iterator[Trap]:
        if "disk" not in self.map.values() or folder is not None:
            return
        if checkpoint is not None and any(checkpoint.glob("*.safetensors")):
            text = (
                "what is on disk is read from the checkpoint's safetensors; without offload_folder "
                "loading fails only for weights that it converts, such as 26B-A4B's experts"
            )
            yield Trap("disk", "note", text)
        else:
            text = (
                "an entry for the disk needs offload_folder, unless the weights are safetensors "
                "files, from which they are then read"
            )
            yield Trap("disk", "warning", text)

    def _no_such_gpu(self) -> Iterator[Trap]:
        import torch

        there = torch.cuda.device_count()
        for device in dict.fromkeys(self.map.values()):
            label = _label(device)
            if there and label.startswith("GPU ") and int(label[4:]) >= there:
                text = f"{label} is not there: this machine has {plural(there, 'GPU')}"
                yield Trap("no_such_gpu", "error", text)

    def _covering_entry(self) -> Iterator[Trap]:
        placement = {n: (self.computes_on(n), d in self.offloads) for n, d in self.map.items()}
        differing = [
            name for name in placement if name in self.modules and _differs(name, placement)
        ]
        covering = [
            key
            for key, device in self.map.items()
            if device not in OFFLOADED
            and any(not key or (n != key and sizes.is_under(n, [key])) for n in differing)
        ]
        for key in covering:
            sums = []
            for tensors in self.tensors.values():
                placed = (t for t in tensors if not key or sizes.is_under(t.name, [key]))
                sums.append(sum(t.on_cuda for t in placed))
            text = (
                f'the entry "{key}" covers others: without root_device_map '
                f"{_label(self.map[key])} holds all of it while loading, "
                f"{_by_quant(self.quants, sums)}"
            )
            yield from _about("root", text, "root_device_map")

    def _embeddings(self) -> Iterator[Trap]:
        from torch import nn

        tables = [
            name
            for name, module in self.modules.items()
            if isinstance(module, nn.Embedding) and self.is_offloaded(name)
        ]
        for name in tables:
            held = sizes.bytes_under(self.whole["bf16"], name)
            text = (
                f"{name} ({size(held)}) is looked up where it rests, only rows travel; without "
                "host_embedding all of it goes to the GPU for each token"
            )
            yield from _about("embedding", text, "host_embedding")
            has_ple = any(sizes.part_of(each) == sizes.PLE for each in self.modules)
            if sizes.part_of(name) == sizes.EMBEDDINGS and has_ple:
                text = "a model with per-layer embeddings reads the pad token's row on meta"
                yield from _about("pad_embedding", text, "offloaded_pad_embedding")

    def _tied(self) -> Iterator[Trap]:
        for target, source in self.tied.items():
            first, second = self.rests_on(source), self.rests_on(target)
            names = f"{source.rpartition('.')[0]} and {target.rpartition('.')[0]}"
            if "disk" in (first, second):
                text = f"{names} are tied, and from_pretrained cannot leave tied weights on disk"
                yield Trap("tied", "error", text)
            elif first != second and self.is_offloaded(source) != self.is_offloaded(target):
                text = f"{names} are tied: with one of them on a GPU, offloading saves nothing"
                yield Trap("tied", "warning", text)

    def _split_layers(self) -> Iterator[Trap]:
        blocks = set(getattr(self.model, "_no_split_modules", None) or ())
        names = [t.name for t in self.whole["bf16"]]
        torn = []
        for name, module in self.modules.items():
            if type(module).__name__ in blocks:
                inside = {self.computes_on(t) for t in names if sizes.is_under(t, [name])}
                torn += [name] if len(inside) > 1 else []
        if torn:
            text = (
                f"inside of {_grouped(torn)} modules compute on several devices: 'found at least "
                "two devices' where their outputs meet outside of a module"
            )
            yield Trap("split_layer", "warning", text)

    def _shared_kv(self) -> Iterator[Trap]:
        text_config = self.model.config.get_text_config()
        types = list(getattr(text_config, "layer_types", None) or ())
        shared = getattr(text_config, "num_kv_shared_layers", 0) or 0
        layers = self._layers()
        if not shared or len(types) < len(layers):
            return
        first = len(types) - shared
        apart: dict[int, list[int]] = {}
        across = False
        for index in range(first, len(types)):
            producers = [i for i in range(first) if types[i] == types[index]]
            if not producers or index not in layers or producers[-1] not in layers:
                continue
            pair = [f"{layers[i]}.self_attn" for i in (producers[-1], index)]
            if self.rests_on(pair[0]) != self.rests_on(pair[1]):
                apart.setdefault(producers[-1], []).append(index)
                across = across or self.computes_on(pair[0]) != self.computes_on(pair[1])
        if apart:
            sources = ", ".join(map(str, apart))
            sharing = len({index for indices in apart.values() for index in indices})
            text = (
                f"{plural(sharing, 'layer')} elsewhere than layers {sources}, whose keys and "
                f"values they share: KeyError: {sources} or a layer type's name after a "
                "dispatch_model of your own or PEFT's"
            )
            yield from _about("shared_kv", text, "shared_kv_states")
            if across:
                text = (
                    f"the keys and values of layers {sources} go from GPU to GPU for each token, "
                    f"to {plural(sharing, 'layer')} that share them; a cut before them spares that"
                )
                yield Trap("kv_between_gpus", "note", text)

    def _second_gpu(self) -> Iterator[Trap]:
        gpus = sorted({d for d in self.map.values() if d not in OFFLOADED}, key=_order)
        if len(gpus) < 2:
            return
        labels = ", ".join(map(_label, gpus))
        text = f"{labels} compute one after the other, and send each other the hidden states"
        yield Trap("several_gpus", "note", text)
        tokens = [n for n in self.modules if n.rpartition(".")[2] == "embed_tokens"]
        if tokens and self.computes_on(tokens[0]) != self.main:
            text = f"the token embeddings are on {_label(self.computes_on(tokens[0]))}"
            text += f", the inputs come to {_label(self.main)}"
            yield from _about("token_device", text, "ple_mask_device")

    def _decoder_layers(self) -> Iterator[Trap]:
        layers = [name for name in self._layers().values() if self.is_offloaded(name)]
        if not layers:
            return
        tensors = self.tensors["bf16"]
        moved = sum(t.bytes for t in tensors if sizes.is_under(t.name, layers) and not t.buffer)
        text = (
            f"{plural(len(layers), 'decoder layer')} off the GPU: {size(moved)} in bfloat16 go "
            "there for each token. A map that names layers keeps them in bfloat16; "
            'device_map="auto" with max_memory offloads them in 4 bit, which offload_streaming '
            "makes fast"
        )
        yield Trap("decoder_layers", "note", text)

    def _not_quantised(self) -> Iterator[Trap]:
        meant: dict[str, tuple[int, int]] = {}
        for quant, names in self.kept.items():
            for offloaded in (True, False):
                found = [name for name in names if self.is_offloaded(name) is offloaded]
                then, otherwise = (
                    sum(t.bytes for t in tensors[quant] if sizes.is_under(t.name, found))
                    for tensors in (self.tensors, self.whole)
                )
                if offloaded and found:
                    meant[quant] = then, otherwise
                elif found:
                    text = (
                        f"{quant}: {_grouped(found)} stay in bfloat16 too, without being "
                        "offloaded: transformers takes the map's names for patterns.  "
                        f"{size(then - otherwise)} more"
                    )
                    yield Trap("not_quantised_by_name", "warning", text)
        if meant:
            then = max(then for then, _ in meant.values())
            text = (
                f"what a map offloads is not quantised (transformers' design): {size(then)} in "
                f"place of {_by_quant(meant, (otherwise for _, otherwise in meant.values()))}"
            )
            yield Trap("not_quantised", "note", text)

    def _layers(self) -> dict[int, str]:
        """The decoder layers' names by number."""
        found = {}
        for name in self.modules:
            layer = re.search(r"(?:^|\.)layers\.(\d+)$", name)
            if layer is not None and sizes.part_of(name) == sizes.LAYERS:
                found[int(layer[1])] = name
        return found


def _quantised(model: Any) -> set[str]:
    kinds = ("Linear4bit", "Linear8bitLt")
    return {name for name, module in model.named_modules() if type(module).__name__ in kinds}


# -- patches --------------------------------------------------------------------------------------

_IN_PLACE = (State.APPLIED, State.ARMED)
_NOT_NEEDED = (State.UNAFFECTED, State.FIXED, State.NOT_INSTALLED)


def _about(name: str, text: str, patch: str) -> Iterator[Trap]:
    """A bug that a patch is for: handled, or open where the patch is not in place.

    Nothing where the installed versions do not have it.
    """
    from .. import status
    from ..patches import load

    state = status()[patch].state
    affects = next(each.affects for each in load() if each.name == patch)
    # The gate is not asked of a patch that is switched off.
    outside = evaluate(affects).outcome in (Outcome.OUTSIDE, Outcome.MISSING)
    if state not in _NOT_NEEDED and not outside:
        level = "handled" if state in _IN_PLACE else "warning"
        yield Trap(name, level, text, patch, state.value)


# -- what is printed ------------------------------------------------------------------------------


def _label(device: int | str) -> str:
    text = str(device)
    if text.removeprefix("cuda:").isdigit():
        return f"GPU {text.removeprefix('cuda:')}"
    return {"cuda": "GPU 0", "cpu": "CPU"}.get(text, text)


def _order(device: int | str) -> tuple[int, str]:
    """GPUs by number, then other devices, the CPU and the disk."""
    label = _label(device)
    if label.startswith("GPU "):
        return int(label[4:]), ""
    return 1000 + ("CPU", "disk").index(label) if label in ("CPU", "disk") else 999, label


def _by_quant(quants: Iterable[str], numbers: Iterable[int]) -> str:
    return ", ".join(f"{size(n)} ({q})" for q, n in zip(quants, numbers, strict=True))


def _grouped(names: Iterable[str], most: int = 3) -> str:
    """A few names; what follows on each other as "layers.30 ... layers.34"."""
    tops: list[str] = []
    for name in names:
        layer = re.match(r"(.*?layers\.\d+)(\.|$)", name)
        top = layer[1] if layer else name
        if top not in tops:
            tops.append(top)
    said = ", ".join(tops[:most])
    return said if len(tops) <= most else f"{said} and {len(tops) - most} more"


def _folded(entries: Iterable[Placed]) -> list[Placed]:
    """Three and more neighbouring layers on one device as one row."""
    groups: list[list[Placed]] = []
    for entry in entries:
        stem, _, number = entry.name.rpartition(".")
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and number.isdigit()
            and (stem, entry.device) == (last.name.rpartition(".")[0], last.device)
        ):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    rows = []
    for group in groups:
        if len(group) < 3:
            rows += group
            continue
        name = f"{group[0].name} ... {group[-1].name.rpartition('.')[2]} ({len(group)})"
        total = {quant: sum(each.bytes[quant] for each in group) for quant in group[0].bytes}
        rows.append(Placed(name, group[0].device, total))
    return rows


def _lines(check: DeviceMapCheck) -> Iterator[str]:
    yield f"{Path(check.model).name or check.model} ({check.architecture})"
    yield ""
    quants = list(check.saves)
    rows: list[list[str]] = []
    for entry in _folded(check.entries):
        name = entry.name or ('"" (the rest)' if len(check.entries) > 1 else '""')
        rows.append([name, entry.device, *_cells(entry.bytes, quants)])
    rows.append([""] * (2 + len(quants)))
    rows += [["loaded", d.device, *_cells(d.bytes, quants)] for d in check.devices]
    if any(check.saves.values()):
        rows.append(["saved on the GPU", "", *_cells(check.saves, quants)])
    yield table(rows, ["entry", "on", *quants], right=range(2, 2 + len(quants)))
    told = list(_told(check))
    if told:
        yield ""
        yield from told
    yield ""
    yield _verdict(check)


def _cells(numbers: Mapping[str, int], quants: Iterable[str]) -> list[str]:
    return [_short(numbers[quant]) for quant in quants]


def _short(number: int) -> str:
    """At most eight characters, so that the longest module name fits beside three of them."""
    if number < 0:
        return f"-{_short(-number)}"
    text = size(number)
    digits, unit = text.split()
    for places in (1, 0):
        if len(text) > 8:
            text = f"{float(digits):.{places}f} {unit}"
    return text


def _told(check: DeviceMapCheck) -> Iterator[str]:
    indent = " " * 9
    for unknown in check.unknown:
        text = f"{unknown.key} is no module of this model: nothing is placed by it"
        if unknown.left_out:
            text = f"{unknown.key} is not in this checkpoint: nothing is placed by it"
        if unknown.closest:
            text += f"; closest: {unknown.closest}, which is on {unknown.closest_on}"
        yield wrap(text, indent, f"{'unknown':<9}")
    for name in check.uncovered[:8]:
        yield wrap(f"{name} has no entry", indent, f"{'missing':<9}")
    if len(check.uncovered) > 8:
        yield wrap(f"and {len(check.uncovered) - 8} more have no entry", indent, f"{'missing':<9}")
    for level in LEVELS:
        for trap in check.traps:
            if trap.level == level:
                state = f" [{trap.patch}: {trap.state}]" if trap.patch else ""
                yield wrap(f"{trap.text}{state}", indent, f"{level:<9}")


def _verdict(check: DeviceMapCheck) -> str:
    levels = {trap.level for trap in check.traps}
    if "error" in levels or check.uncovered:
        return "this map does not work"
    if not check.ok:
        return "this map works, but not as it seems: see above"
    return "fine, with gemma4_compat" if "handled" in levels else "fine"


__all__ = ["DeviceMapCheck", "InputError", "Placed", "Trap", "UnknownKey", "check_device_map"]
