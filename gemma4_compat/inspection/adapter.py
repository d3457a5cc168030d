"""Inspect an adapter: what its safetensors header holds, and which tensors a model loads.

``inspect_adapter`` is also the command ``gemma4-compat adapter DIR``.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import text
from ..engine.gate import holds
from ..errors import InputError
from ..model.files import (
    Entry,
    Header,
    Location,
    exists,
    file_in,
    header_in,
    is_in,
    located,
    read_adapter_config,
    read_header,
)
from ..model.hub import Repository, short_name
from ..model.parts import TOWERS, is_shared_kv, tower_of
from ..result import Result
from .targets import BaseModel, base_model_of, lora_parameters, matching, needs_patch

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
#: the methods by the prefix of their tensors' names
_METHODS = {
    "lora_": "LoRA", "hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT", "boft_": "BOFT",
    "ia3_": "IA3", "vera_": "VeRA", "pvera_": "PVeRA", "hra_": "HRA", "fourierft_": "FourierFT",
    "vblora_": "VB-LoRA", "randlora_": "RandLoRA", "ln_tuning_": "LN tuning", "c3a_": "C3A",
    "road_": "RoAd", "miss_": "MiSS", "bone_": "Bone", "shira_": "SHiRA", "poly_": "Poly",
    "waveft_": "WaveFT", "delora_": "DeLoRA", "gralora_": "GraLoRA", "osf_": "OSF",
    "hira_": "HiRA", "token_adapter": "trainable tokens", "prompt_": "prompt tuning",
    "base_prompt_": "prefix tuning",
}  # fmt: skip
_WRAPPED = re.compile(
    r"(?:^|\.)(?:vision_tower\.encoder|audio_tower)\.layers\.\d+\.(?:.*\.)?"
    r"(?:[qkvo]_proj|gate_proj|up_proj|down_proj|post|ffw_layer_[12]|linear_start|linear_end)"
    r"(\.linear)?$"
)
#: decoder layers that share keys and values, by hidden size and number of layers: E2B and E4B
_SHARED = {(1536, 35): range(15, 35), (2560, 42): range(24, 42)}
_NO_TYPE = "which the installed PEFT does not support"
_WIDTHS = "the widths differ: the adapter is for another model"
#: the axis of a LoRA tensor that has its layer's width, and the layer's attribute for it
_AXES = {
    "lora_A": (1, "in_features"),
    "lora_B": (0, "out_features"),
    "lora_magnitude_vector": (0, "out_features"),
    "lora_embedding_A": (1, "num_embeddings"),
    "lora_embedding_B": (0, "embedding_dim"),
}
#: the text-only model and the multimodal model name their decoder layers differently
_OTHER_CLASS = (
    (r"^model\.(?=layers\.|embed_tokens|norm|per_layer)", "model.language_model."),
    (r"^model\.language_model\.", "model."),
)
#: the same, and the names in other classes
_OTHER_NAMES = (
    *_OTHER_CLASS,
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.", "model."),
)


@dataclass(frozen=True)
class Tower:
    """An adapter's tensors for one part of the model; ``targets`` counts its layers by name."""

    name: str
    tensors: int
    layers: int
    targets: Mapping[str, int]


@dataclass(frozen=True)
class Group:
    """Tensors, or layers, with the same outcome for the same reason.

    ``kind`` is "ignored" (PEFT does not load the tensors), "refused" (loading raises) or "missing"
    (``target_modules`` matches the layers, but the file has no tensors for them).  A ``harmless``
    group does not change the model's output.
    """

    kind: str
    count: int
    reason: str
    example: str
    harmless: bool = False


@dataclass(frozen=True)
class Fit:
    """How an adapter fits a model: ``loads`` tensors load with the patches in ``needs`` applied."""

    model: str
    architecture: str
    loads: int
    needs: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def ok(self) -> bool:
        """Whether the adapter loads, and no tensor that has an effect is ignored."""
        return bool(self.loads) and all(group.harmless for group in self.groups)

    @property
    def verdict(self) -> str:
        if self.ok:
            return "fits" + (f", with the patch {', '.join(self.needs)}" if self.needs else "")
        if any(group.kind == "refused" for group in self.groups):
            return "does NOT fit: loading it fails; use the model that it was trained on"
        return "fits only in PART" if self.loads else "does NOT fit: none of its tensors would load"


@dataclass(frozen=True)
class AdapterInspection(Result):
    """An adapter, as its safetensors header and its ``adapter_config.json`` describe it.

    ``parts`` counts tensors by their kind ("lora_A", "lora_magnitude_vector", ...); "weight" and
    the like are full tensors of the model.  ``ranks`` counts layers by their rank.  ``layout`` says
    how the file names the layers inside ``Gemma4ClippableLinear``: "inner" (``q_proj.linear``),
    "outer" (``q_proj``) or "both".  ``orphans`` are the ``k_proj`` and ``v_proj`` of layers that
    share keys and values, which Gemma 4 does not use.  ``bytes`` is the size of the tensors in the
    file.
    """

    file: str
    kind: str
    base_model: str | None
    saved_by: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    parts: Mapping[str, int]
    towers: tuple[Tower, ...]
    layout: str | None
    ranks: Mapping[int, int]
    rank: int | None
    alpha: float | None
    target_modules: str | tuple[str, ...] | None
    orphans: tuple[str, ...]
    notes: tuple[str, ...]
    fit: Fit | None

    @property
    def ok(self) -> bool:
        """Whether the adapter fits the model; True if no model was given."""
        return self.fit is None or self.fit.ok

    @property
    def verdict(self) -> str:
        return "" if self.fit is None else self.fit.verdict

    def as_dict(self) -> dict[str, Any]:
        result = {**asdict(self), "ok": self.ok}
        if self.fit is not None:
            result["fit"] |= {"ok": self.fit.ok, "verdict": self.fit.verdict}
        return result

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def inspect_adapter(path: Location, model: Any = None) -> AdapterInspection:
    """Inspect an adapter; with a model, also report which tensors PEFT would load into it.

    Args:
        path: an adapter's folder, Hub id ("NAMESPACE/NAME", or "NAMESPACE/NAME@REVISION") or
            safetensors file; only the header is read.
        model: a checkpoint's folder or Hub id, of which only ``config.json`` is read, or a model.

    Raises:
        InputError: a file is missing or damaged, or is not an adapter.
        InputError: transformers does not know the model that ``config.json`` describes.

    Example:
        >>> found = inspect_adapter("my-lora", "gemma-4-E2B-it")
        >>> found.ok, found.kind, found.rank
        (True, 'LoRA', 4)
    """
    header, config = _header_and_config(path)
    file = header.file
    keys = [_Key.of(entry) for entry in header.tensors.values()]
    if not any(key.method for key in keys) and not config.get("peft_type"):
        raise InputError(f"{file}: none of its tensors belongs to an adapter")
    layers: dict[str, list[_Key]] = {}
    for key in keys:
        if key.method and key.layer:
            layers.setdefault(key.layer, []).append(key)
    ranks = Counter(rank for of_layer in layers.values() for rank in _ranks(of_layer))
    base = base_model_of(model) if model is not None else None
    shared = base.shared if base is not None else _known_shared(layers)
    targets = config.get("target_modules")
    return AdapterInspection(
        file=str(file),
        kind=_kind(keys, config),
        base_model=config.get("base_model_name_or_path") or None,
        saved_by=_saved_by(keys),
        tensors=len(keys),
        parameters=sum(key.entry.numel for key in keys),
        bytes=sum(key.entry.bytes for key in keys),
        dtypes=dict(sorted(Counter(key.entry.dtype for key in keys).items())),
        parts=dict(sorted(Counter(key.part for key in keys).items())),
        towers=tuple(_towers(keys, layers)),
        layout=_layout(layers, base),
        ranks=dict(sorted(ranks.items())),
        rank=config.get("r"),
        alpha=config.get("lora_alpha"),
        target_modules=tuple(sorted(targets)) if isinstance(targets, list) else targets,
        orphans=tuple(layer for layer in layers if is_shared_kv(layer, shared)),
        notes=tuple(_notes(header, keys, config, ranks)),
        fit=None if base is None else _fit(header, keys, layers, config, base),
    )


def _header_and_config(path: Location) -> tuple[Header, dict[str, Any]]:
    """The header of the safetensors file, and the content of ``adapter_config.json``."""
    if not isinstance(path, Repository) and exists(Path(path)) and not os.path.isdir(path):
        return _of_file(Path(path))
    folder = located(path, "file or folder")
    config = file_in(folder, CONFIG)
    if not is_in(folder, WEIGHTS):
        raise InputError(f"{folder}: no {WEIGHTS}{_instead(folder)}")
    if config is None:
        raise InputError(f"{folder}: no {CONFIG}, which PEFT needs")
    return header_in(folder, WEIGHTS), read_adapter_config(config)


def _of_file(file: Path) -> tuple[Header, dict[str, Any]]:
    if file.suffix in (".bin", ".pt", ".pth"):
        raise InputError(f"{file}: a pickle file; only safetensors files are read")
    config = file.parent / CONFIG
    return read_header(file), read_adapter_config(config) if config.is_file() else {}


def _instead(folder: Path | Repository) -> str:
    if is_in(folder, "adapter_model.bin"):
        return " (there is an adapter_model.bin, but pickle files are not read)"
    files = folder.glob(f"*/{WEIGHTS}") if isinstance(folder, Path) else ()
    below = sorted(file.parent.name for file in files)
    if below:
        return f", but there is one in {', '.join(below)}"
    return " (is it the folder of a model?)" if is_in(folder, "config.json") else ""


# -- the tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """The parts of a tensor's name.

    ``layer`` is the name of the model's layer.  ``part`` is "lora_A" and the like, or "weight" for
    a full tensor of the model; ``method`` is then empty.
    """

    entry: Entry
    layer: str
    part: str
    method: str
    rest: str

    @property
    def adapter(self) -> str:
        """The adapter's name; PEFT omits it when it saves, other programs write it."""
        name = self.rest.partition(".")[0] if self.part.startswith("lora_") else ""
        return "" if name in ("weight", "bias") else name

    @classmethod
    def of(cls, entry: Entry) -> _Key:
        name = entry.name.removeprefix(_PREFIX).removeprefix("base_model.")
        steps = name.split(".")
        for number, step in enumerate(steps):
            method = next((m for start, m in _METHODS.items() if step.startswith(start)), "")
            if method:
                layer, rest = ".".join(steps[:number]), ".".join(steps[number + 1 :])
                return cls(entry, _unwrapped(layer), step, method, rest)
        return cls(entry, _unwrapped(name.rpartition(".")[0]), steps[-1], "", "")


def _unwrapped(name: str) -> str:
    return re.sub(r"(\.base_layer)+$", "", name)


def _kind(keys: Iterable[_Key], config: Mapping[str, Any]) -> str:
    methods = Counter(key.method for key in keys if key.method)
    parts = {key.part for key in keys}
    names = [method for method, _ in methods.most_common()]
    if "lora_magnitude_vector" in parts:
        names[names.index("LoRA")] = "DoRA"
    elif "lora_E" in parts:
        names[names.index("LoRA")] = "AdaLoRA"
    return ", ".join(names) or str(config["peft_type"])


def _saved_by(keys: Iterable[_Key]) -> str:
    prefixed = {key.entry.name.startswith("base_model.") for key in keys}
    if len(prefixed) > 1:
        return "mixed"
    return "peft" if True in prefixed else "transformers"


def _ranks(of_layer: Iterable[_Key]) -> Iterator[int]:
    for key in of_layer:
        if key.part in ("lora_A", "lora_embedding_A", "hada_w1_b") and key.rest != "bias":
            yield key.entry.shape[0]


def _towers(keys: list[_Key], layers: Iterable[str]) -> Iterator[Tower]:
    tensors = Counter(tower_of(key.layer) for key in keys)
    targets: dict[str, Counter[str]] = {tower: Counter() for tower in TOWERS}
    for layer in layers:
        *_, above, last = ["", *layer.split(".")]
        targets[tower_of(layer)][f"{above}.{last}" if last == "linear" else last] += 1
    for tower in TOWERS:
        if tensors[tower]:
            counts = dict(sorted(targets[tower].items()))
            yield Tower(tower, tensors[tower], sum(counts.values()), counts)


def _layout(layers: Iterable[str], base: BaseModel | None) -> str | None:
    layouts = set()
    for layer in layers:
        match = _WRAPPED.search(layer)
        if base is not None:
            outer = layer.removesuffix(".linear")
            if base.inner(outer) != outer if outer in base.modules else match:
                layouts.add("inner" if outer != layer else "outer")
        elif match is not None:
            layouts.add("inner" if match[1] else "outer")
    return "both" if len(layouts) > 1 else next(iter(layouts), None)


def _known_shared(layers: Mapping[str, list[_Key]]) -> range:
    """The layers that share keys and values, if width and number of layers are E2B's or E4B's."""
    highest, width = 0, 0
    for layer, keys in layers.items():
        match = re.search(r"(?:^|\.)layers\.(\d+)\.self_attn\.q_proj$", layer)
        if match is None or tower_of(layer) != "language":
            continue
        highest = max(highest, int(match[1]) + 1)
        width = next((k.entry.shape[-1] for k in keys if k.part == "lora_A"), width)
    return _SHARED.get((width, highest), range(0))


def _notes(
    header: Header, keys: list[_Key], config: Mapping[str, Any], ranks: Mapping[int, int]
) -> Iterator[str]:
    if header.missing:
        yield f"the file is cut off: {text.size(header.missing)} of its tensors are missing"
    if not config:
        yield f"its folder has no {CONFIG}; PEFT needs one"
    elif not config.get("peft_type"):
        yield f"{CONFIG} has no peft_type; PEFT needs one"
    if wrong := _other_ranks(config, ranks):
        yield (
            f"{CONFIG} says rank {config['r']}, but the file has tensors of rank "
            f"{', '.join(map(str, wrong))}"
        )
    if named := sorted({key.adapter for key in keys} - {""}):
        yield (
            f"the tensors' names contain the adapter's name ({', '.join(named)}), which PEFT omits "
            "when it saves: PEFT < 0.21 loads none of them, later releases only under that name"
        )
    whole = sorted({key.layer for key in keys if not key.method})
    if whole:
        yield f"the file also holds full tensors of the model: {text.some(whole, 3)}"


def _other_ranks(config: Mapping[str, Any], ranks: Iterable[int]) -> list[int]:
    """The ranks among these that the config does not name."""
    rank = config.get("r")
    if rank is None or config.get("peft_type") not in ("LORA", "LOHA"):
        return []
    pattern = (config.get("rank_pattern") or {}).values()
    return sorted(set(ranks) - {rank, *(each for each in pattern if isinstance(each, int))})


# -- the fit with a model -------------------------------------------------------------------------


class _Fate(NamedTuple):
    """Whether a tensor loads, and why not; ``kind`` is empty if it loads."""

    kind: str = ""
    reason: str = ""
    harmless: bool = False
    detail: str = ""


def _fit(
    header: Header,
    keys: list[_Key],
    layers: Mapping[str, list[_Key]],
    config: Mapping[str, Any],
    base: BaseModel,
) -> Fit:
    targeted = _targeted(config, base)
    inside = {base.inner(name): name for name in targeted or ()}
    adapted = {*inside, *_with_parameters(config, base)} if targeted is not None else None
    groups: dict[tuple[str, str], Group] = {}

    def add(kind: str, reason: str, example: str, harmless: bool = False) -> None:
        group = groups.get((kind, reason), Group(kind, 0, reason, example, harmless))
        groups[kind, reason] = replace(group, count=group.count + 1)

    loads = 0
    wrapped = any(base.inner(name) != name for name in targeted or ())
    renamed = False
    cut = _cut_off(header)
    unknown = bool(config) and not _is_known(config.get("peft_type"))
    for own in keys:
        key = replace(own, layer=_name_in_model(own.layer, base))
        fate = _fate(key, adapted, base)
        if unknown:
            fate = _Fate(
                "refused", f"{CONFIG} has peft_type {config.get('peft_type')!r}, {_NO_TYPE}"
            )
        if fate.kind == "ignored" and key.layer != own.layer:  # text_model_adapter raises
            fate = fate._replace(kind="refused")
        if not fate.kind and (wrong := _other_ranks(config, _ranks(layers.get(own.layer, ())))):
            reason = f"their rank is not {config['r']}, the rank in {CONFIG}"
            fate = _Fate("refused", reason, detail=str(wrong[0]))
        if not fate.kind and key.entry.name in cut:
            fate = _Fate("refused", "the file is cut off before their end")
        if fate.kind:
            detail = f": {fate.detail}" if fate.detail else ""
            add(fate.kind, fate.reason, f"{key.entry.name}{detail}", fate.harmless)
        else:
            loads += 1
            renamed = renamed or key.layer != own.layer
            wrapped = wrapped or (bool(key.method) and base.inner(key.layer) != key.layer)
    rank = config.get("r") or 1
    for layer, name in inside.items() if config.get("peft_type") == "LORA" else ():
        if lora_parameters(base.modules[layer], rank) is None:
            kind = type(base.modules[name]).__name__
            add("refused", f"target_modules names {kind}, which LoRA does not support", name)
    filled = {base.inner(_name_in_model(layer, base)) for layer in layers}
    for layer in inside:
        if layer not in filled:
            reason = f"{tower_of(layer)}: in target_modules, but the file has no tensors for them"
            add("missing", reason, layer, harmless=True)
    order = ("refused", "ignored", "missing")
    ordered = sorted(groups.values(), key=lambda group: (order.index(group.kind), -group.count))
    needs = ["clippable_linear"] if wrapped and needs_patch("clippable_linear") else []
    needs += ["text_model_adapter"] if renamed and needs_patch("text_model_adapter") else []
    return Fit(base.name, base.architecture, loads, tuple(needs), tuple(ordered))


def _is_known(peft_type: Any) -> bool:
    """Whether PEFT knows this type of adapter; assumed if PEFT is not installed."""
    if not isinstance(peft_type, str):
        return False
    if importlib.util.find_spec("peft") is None:
        return True
    from peft import PeftType

    return peft_type in {str(each.value) for each in PeftType}


def _name_in_model(layer: str, base: BaseModel) -> str:
    """This model's name for a layer that another class of the same model names differently."""
    if layer not in base.modules and base.model.config.model_type.startswith("gemma4"):
        for pattern, replacement in _OTHER_CLASS:
            other = re.sub(pattern, replacement, layer)
            if other != layer and other in base.modules:
                return other
    return layer


def _targeted(config: Mapping[str, Any], base: BaseModel) -> list[str] | None:
    """The modules that the config's targets match; ``None`` if it has no targets."""
    if not config.get("target_modules"):
        return None
    names = (
        "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform",
        "layers_pattern", "peft_type",
    )  # fmt: skip
    settings = {name: config[name] for name in names if config.get(name) is not None}
    return matching(base, SimpleNamespace(**settings))


def _cut_off(header: Header) -> set[str]:
    """The tensors that are not complete in the file."""
    cut: set[str] = set()
    left = header.missing
    for entry in reversed(list(header.tensors.values())):
        if left <= 0:
            break
        cut.add(entry.name)
        left -= entry.bytes
    return cut


def _with_parameters(config: Mapping[str, Any], base: BaseModel) -> Iterator[str]:
    """The modules of the parameters that ``target_parameters`` names."""
    targets = config.get("target_parameters") or ()
    for target in [targets] if isinstance(targets, str) else targets:
        module = target.rpartition(".")[0]
        yield from (n for n in base.modules if n == module or n.endswith(f".{module}"))


def _fate(key: _Key, adapted: Collection[str] | None, base: BaseModel) -> _Fate:
    if not key.layer:  # shared by all layers
        return _Fate()
    if key.layer not in base.modules:
        return _absent(key, base)
    if key.adapter and holds("peft<0.21"):
        return _Fate("ignored", "their names contain an adapter's name, and this PEFT expects none")
    layer = base.inner(key.layer) if key.method else key.layer
    if adapted is not None and key.method not in ("", "trainable tokens") and layer not in adapted:
        return _Fate("ignored", "target_modules does not name these layers")
    if wrong := _misshapen(key, base.modules[layer]):
        return _Fate("refused", _WIDTHS, detail=wrong)
    return _Fate()


def _absent(key: _Key, base: BaseModel) -> _Fate:
    """Why the model has no module of this name."""
    name, tower = key.layer, tower_of(key.layer)
    if is_shared_kv(name, base.shared):
        first, last = base.shared[0], base.shared[-1]
        reason = f"layers {first} to {last} reuse the keys and values of earlier layers: no effect"
        return _Fate("ignored", reason, harmless=True)
    if name.endswith(".linear") and name.removesuffix(".linear") in base.modules:
        return _Fate("ignored", "named .linear, but the model's layer has no .linear inside")
    for pattern, replacement in _OTHER_NAMES:
        other = re.sub(pattern, replacement, name)
        if other != name and other in base.modules:
            if wrong := _misshapen(key, base.modules[base.inner(other)]):
                return _Fate("ignored", "for another model: names and widths differ", detail=wrong)
            saved, expected = re.split(r"\d", name)[0], re.split(r"\d", other)[0]
            reason = f"made for another model class: {saved}* is {expected}* in this model"
            return _Fate("ignored", reason)
    layer = re.match(r"(.*?(?:^|\.)layers)\.(\d+)\.", name)
    if layer is not None and layer[1] in base.modules:
        count = len(base.modules[layer[1]])
        if int(layer[2]) >= count:
            return _Fate("ignored", f"for layers from {count} on; {layer[1]} has {count} layers")
    if tower in ("vision", "audio") and not any(tower_of(n) == tower for n in base.modules):
        return _Fate("ignored", f"the model has no {tower} tower")
    return _Fate("ignored", "the model has no such layer")


def _misshapen(key: _Key, module: Any) -> str:
    """How a tensor's shape differs from the one that the layer needs; empty if it does not."""
    shape = key.entry.shape
    if not key.method:
        expected = getattr(module, key.part, None)
        if expected is not None and tuple(expected.shape) != shape:
            return f"shape {list(shape)}, the model has {list(expected.shape)}"
        return ""
    axis, attribute = _AXES.get(key.part, (0, ""))
    width = getattr(module, attribute, None)
    if width is None or axis >= len(shape) or key.rest == "bias" or shape[axis] == width:
        return ""
    return f"width {shape[axis]}, the layer has {width}"


# -- what is printed ------------------------------------------------------------------------------


def _lines(report: AdapterInspection) -> Iterator[str]:
    dtypes = ", ".join(
        f"{count} {dtype}" if len(report.dtypes) > 1 else dtype
        for dtype, count in report.dtypes.items()
    )
    ranks = ", ".join(
        f"{rank} ({text.plural(count, 'layer')})" if len(report.ranks) > 1 else str(rank)
        for rank, count in report.ranks.items()
    )
    kind = report.kind
    if ranks:
        kind += f", rank {ranks}"
    if report.alpha is not None:
        kind += f", alpha {report.alpha}"
    targets = report.target_modules
    prefixes = {"peft": f"{_PREFIX} (PEFT's)", "transformers": "none", "mixed": "mixed"}
    rows = [
        ("file", report.file),
        ("adapter", kind),
        ("base model", report.base_model or "unknown"),
        (
            "holds",
            f"{text.plural(report.tensors, 'tensor')} ({dtypes}), {report.parameters:,} "
            f"parameters, {text.size(report.bytes)}",
        ),
        ("prefix", prefixes[report.saved_by]),
    ]
    if targets is not None:
        rows.append(("targets", targets if isinstance(targets, str) else text.some(targets)))
    layouts = {
        "inner": "q_proj.linear.*, as PEFT saves them",
        "outer": "q_proj.*, which needs the patch clippable_linear",
        "both": "q_proj.linear.* and q_proj.*; the second needs the patch clippable_linear",
    }
    if report.layout is not None:
        rows.append(("clipped", f"{report.layout} layout: {layouts[report.layout]}"))
    for label, value in rows:
        yield text.wrap(value, " " * 12, f"{label:<12}", breaks=label == "targets")
    yield ""
    yield text.table(
        [
            (t.name, t.tensors, t.layers, ", ".join(f"{n}\xa0{c}" for n, c in t.targets.items()))
            for t in report.towers
        ],
        ("tower", "tensors", "layers", "by name"),
        right=(1, 2),
    )
    if any(part not in ("lora_A", "lora_B") for part in report.parts):
        parts = ", ".join(f"{count} {part}" for part, count in report.parts.items())
        yield text.wrap(parts, " " * 9, "tensors: ")
    notes = list(report.notes)
    if report.orphans and report.fit is None:
        notes.append(
            f"{len(report.orphans)} k_proj and v_proj belong to decoder layers that reuse the keys "
            "and values of earlier layers. They have no effect, and are ignored on loading "
            "(transformers < 5.5.2 has modules for them)"
        )
    if notes:
        yield ""
    for note in notes:
        yield text.wrap(note, " " * 6, "note: ")
    if report.fit is not None:
        yield ""
        yield from _fit_lines(report.fit)


def _fit_lines(fit: Fit) -> Iterator[str]:
    name = short_name(fit.model)
    yield f"in {name} ({fit.architecture})".replace("in  (", "in (")
    with_patches = f"with the patch {', '.join(fit.needs)}" if fit.needs and fit.loads else ""
    rows = [("loads", text.plural(fit.loads, "tensor"), with_patches)]
    for group in fit.groups:
        if group.kind == "missing" and not fit.loads:
            continue  # no tensor loads, so every layer is missing
        unit = "layer" if group.kind == "missing" else "tensor"
        rows.append((group.kind, text.plural(group.count, unit), group.reason))
    yield text.table(rows, indent="  ")
    for group in fit.groups:
        if not group.harmless:
            example = group.example.removeprefix(_PREFIX).replace(".weight", "")
            yield text.wrap(f"{group.kind}, such as {example}", " " * 4, "  ")
    yield fit.verdict
