"""Inspect an adapter: what its safetensors header holds, and which tensors a model loads.

``inspect_adapter`` is also the command ``gemma4-compat adapter DIR``.  This is one file because a
report is made in one pass over what the file holds and what PEFT would load.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.gate import holds
from ..errors import InputError, reason
from ..files.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Entry,
    Header,
    Location,
    adapter_header,
    exists,
    file_in,
    located,
    read_adapter_config,
    read_header,
)
from ..files.hub import Repository, short_name
from ..model.meta import COMPRESSED, QAT, on_meta
from ..model.parts import TOWERS, is_shared_kv, shared_layers, tower_of
from ..results import text
from ..results.result import Result
from .targets import BaseModel, base_model_of, matching, needs_patch, pinned, with_patches

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
#: the axis of a LoRA tensor that has its layer's width, and the layer's attribute for it
_AXES = {
    "lora_A": (1, "in_features"),
    "lora_B": (0, "out_features"),
    "lora_magnitude_vector": (0, "out_features"),
    "lora_embedding_A": (1, "num_embeddings"),
    "lora_embedding_B": (0, "embedding_dim"),
}
#: the layer, the part, how many adapters are around this one, and whether it is a bias
_Tensor = tuple[str, str, int, bool]
_ZERO = (
    "PEFT multiplies them by lora_alpha or alpha_pattern, which is 0: use the value that the "
    "adapter was trained with"
)
_UNTRAINED = "all values of lora_B are 0, as before training: the outputs are those of the model"
_DEQUANTIZED = (
    "if from_pretrained gets quantization_config=CompressedTensorsConfig(dequantize=True) "
    "(transformers 5.21 or later): else PEFT raises \"'Linear' object has no attribute 'weight'\""
)
#: the beginnings of the text model's names in the text-only and in the multimodal class
_CLASSES = (("model.", "model.language_model."), ("model.language_model.", "model."))


@dataclass(frozen=True)
class Group:
    """Tensors with the same outcome for the same reason.

    ``kind`` is "ignored" (PEFT does not load the tensors), "no effect" (it multiplies them by 0, or
    all ``lora_B`` are 0), "refused" (loading raises) or "missing" (with this
    ``adapter_config.json`` PEFT saves tensors that the file lacks).  A ``harmless`` group does not
    change the model's output.
    """

    kind: str
    reason: str
    example: str
    harmless: bool = False
    count: int = 1


@dataclass(frozen=True)
class AdapterInspection(Result):
    """An adapter, as its safetensors header and its ``adapter_config.json`` describe it.

    ``bytes`` is the size of the tensors.  ``towers`` counts tensors and layers by part of the
    model, ``ranks`` layers by their rank.  If a model was given, ``loads`` tensors load into it
    with the patches in ``needs`` applied, and ``groups`` are the others; else ``model`` is
    ``None``.  ``unchecked`` says why it is not known which tensors are missing, if it is not.
    ``condition`` is how the model has to be loaded, if not as usual.
    """

    file: str
    kind: str
    base_model: str | None
    tensors: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    towers: Mapping[str, Mapping[str, int]]
    ranks: Mapping[int, int]
    rank: int | None
    target_modules: str | tuple[str, ...] | None
    model: str | None = None
    architecture: str | None = None
    loads: int = 0
    needs: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    unchecked: str = ""
    condition: str = ""

    @property
    def ok(self) -> bool:
        """Whether the adapter loads into the model, and none with an effect is ignored or missing.

        True if no model was given.
        """
        return self.model is None or (
            bool(self.loads) and all(group.harmless for group in self.groups)
        )

    @property
    def verdict(self) -> str:
        if self.model is None:
            return ""
        if self.ok:
            note = self.unchecked and f"; missing tensors are not checked: {self.unchecked}"
            return f"fits{with_patches(self.needs)}{self.condition and f', {self.condition}'}{note}"
        if any(group.kind == "refused" for group in self.groups):
            return (
                "does NOT fit: loading it fails; use the model that it was trained on, and a "
                "complete file"
            )
        if self.loads == sum(group.count for group in self.groups if group.kind == "no effect") > 0:
            return "loads, but has NO effect"
        return "fits only in PART" if self.loads else "does NOT fit: none of its tensors would load"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "verdict": self.verdict}

    def _lines(self) -> Iterator[str]:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        ranks = (f", rank {r} on {text.plural(n, 'layer')}" for r, n in self.ranks.items())
        rows = {
            "file": self.file,
            "adapter": "".join([self.kind, *ranks]),
            "base model": self.base_model or "unknown",
            "holds": f"{text.plural(self.tensors, 'tensor')} ({dtypes}), {self.parameters:,} "
            f"parameters, {text.size(self.bytes)}",
        }
        if (targets := self.target_modules) is not None:
            rows["targets"] = targets if isinstance(targets, str) else text.some(targets)
        for label, value in rows.items():
            yield text.wrap(value, " " * 12, f"{label:<12}", breaks=label == "targets")
        yield ""
        towers = [(name, each["tensors"], each["layers"]) for name, each in self.towers.items()]
        yield text.table(towers, ("tower", "tensors", "layers"), right=(1, 2))
        if self.model is not None:
            yield ""
            yield from _fit_lines(self)


def inspect_adapter(path: Location, model: Any = None) -> AdapterInspection:
    """Inspect an adapter; with a model, also report which tensors PEFT would load into it.

    Args:
        path: an adapter's folder, Hub id ("NAMESPACE/NAME", or "NAMESPACE/NAME@REVISION") or
            safetensors file; only the header is read, and with a model whether ``lora_B`` is 0.
        model: a checkpoint's folder or Hub id, of which only ``config.json`` is read, or a model.

    Raises:
        InputError: a file is missing or damaged, or is not an adapter.
        InputError: transformers does not know the model that ``config.json`` describes.

    Example:
        >>> found = inspect_adapter("my-lora", "gemma-4-E2B-it")
        >>> found.ok, found.kind, found.rank
        (True, 'LoRA', 4)
    """
    file, header, config = _header_and_config(path)
    keys = [_Key.of(entry) for entry in header.values()]
    if not any(key.method for key in keys) and not config.get("peft_type"):
        raise InputError(f"{file}: none of its tensors belongs to an adapter")
    ranks = Counter(k.entry.shape[0] for k in keys if k.part in ("lora_A", "lora_embedding_A"))
    targets = config.get("target_modules")
    found = AdapterInspection(
        file=file,
        kind=_kind(keys, config),
        base_model=config.get("base_model_name_or_path") or None,
        tensors=len(keys),
        parameters=sum(key.entry.numel for key in keys),
        bytes=sum(key.entry.bytes for key in keys),
        dtypes=dict(sorted(Counter(key.entry.dtype for key in keys).items())),
        towers=_towers(keys),
        ranks=dict(sorted(ranks.items())),
        rank=config.get("r"),
        target_modules=tuple(sorted(targets)) if isinstance(targets, list) else targets,
    )
    return found if model is None else _fitted(found, keys, config, base_model_of(model))


def _header_and_config(path: Location) -> tuple[str, Header, dict[str, Any]]:
    """The safetensors file, its header, and the content of ``adapter_config.json``."""
    if not isinstance(path, Repository) and exists(Path(path)) and not os.path.isdir(path):
        beside = Path(path).parent / ADAPTER_CONFIG
        config = read_adapter_config(beside) if beside.is_file() else {}
        return str(Path(path)), read_header(path), config
    folder = located(path, "file or folder")
    config_file = file_in(folder, ADAPTER_CONFIG)
    header = adapter_header(folder)
    if config_file is None:
        raise InputError(f"{folder}: no {ADAPTER_CONFIG}, which PEFT needs")
    return str(folder / ADAPTER_WEIGHTS), header, read_adapter_config(config_file)


# -- the tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """The parts of a tensor's name.

    ``layer`` is the name of the model's layer.  ``part`` is "lora_A" and the like, or "weight" for
    a full tensor of the model; ``method`` is then empty.  ``rest`` follows ``part``.  Of a tensor
    that PEFT creates, ``kind`` is the group if the file lacks it, or empty if PEFT does not save
    it, and ``idle`` says whether PEFT multiplies it by 0.
    """

    entry: Entry
    layer: str
    part: str
    method: str
    rest: str
    kind: str = ""
    idle: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the name contains the adapter's name; PEFT omits it when it saves."""
        return self.part.startswith("lora_") and self.rest not in ("", "weight", "bias")

    @property
    def is_update(self) -> bool:
        """Whether the tensor belongs to a layer that ``target_modules`` names."""
        return self.method not in ("", "trainable tokens")

    def tensor(self, base: BaseModel) -> _Tensor:
        """What identifies the tensor, also if the file names the wrapper of its layer."""
        layer = base.inner(self.layer) if self.method else self.layer
        depth = self.entry.name.count(".base_layer") if self.method else 0
        return layer, self.part, depth, self.rest.endswith("bias")

    @classmethod
    def of(cls, entry: Entry) -> _Key:
        name = re.sub(r"^base_model\.(model\.)?", "", entry.name).replace(".base_layer", "")
        steps = name.split(".")
        for number, step in enumerate(steps):
            method = next((m for start, m in _METHODS.items() if step.startswith(start)), "")
            if method:
                layer, rest = ".".join(steps[:number]), ".".join(steps[number + 1 :])
                return cls(entry, layer, step, method, rest)
        return cls(entry, name.rpartition(".")[0], steps[-1], "", "")


def _kind(keys: Iterable[_Key], config: Mapping[str, Any]) -> str:
    parts = {key.part for key in keys}
    if "lora_magnitude_vector" in parts:
        return "DoRA"
    if "lora_E" in parts:
        return "AdaLoRA"
    methods = dict.fromkeys(key.method for key in keys if key.method)
    return ", ".join(methods) or str(config["peft_type"])


def _towers(keys: list[_Key]) -> dict[str, dict[str, int]]:
    tensors = Counter(tower_of(key.layer) for key in keys)
    layers = Counter(map(tower_of, {key.layer for key in keys if key.method and key.layer}))
    return {
        tower: {"tensors": tensors[tower], "layers": layers[tower]}
        for tower in TOWERS
        if tensors[tower]
    }


# -- the fit with a model -------------------------------------------------------------------------


def _fitted(
    found: AdapterInspection,
    keys: list[_Key],
    config: Mapping[str, Any],
    base: BaseModel,
) -> AdapterInspection:
    """The inspection with the fit of the adapter to a model."""
    has_targets = bool(config.get("target_modules"))
    targeted = matching(base, config) if has_targets else []
    fitting = [replace(own, layer=_name_in_model(own.layer, base)) for own in keys]
    expected, whole_file, unchecked = _expected(found, config, targeted, base)
    updated = (each.layer for each in expected.values() if each.is_update)
    adapted = {*map(base.inner, targeted), *updated} if has_targets else None
    groups: list[Group] = []
    idle: list[Group] = []
    wrapped = any(base.inner(name) != name for name in targeted)
    renamed = False
    for own, key in zip(keys, fitting, strict=True):
        fate = whole_file
        made = expected.get(key.tensor(base))
        # else of an unknown method
        if key.layer in base.modules or made is None or made.entry.name != key.entry.name:
            fate = fate or _fate(key, adapted, made, bool(expected), base)
        if fate is None:
            if key.is_update and made is not None and made.idle:
                idle.append(Group("no effect", _ZERO, key.entry.name))
            renamed = renamed or key.layer != own.layer
            wrapped = wrapped or (bool(key.method) and base.inner(key.layer) != key.layer)
        elif fate.kind == "ignored" and key.layer != own.layer:  # text_model_adapter raises
            groups.append(replace(fate, kind="refused"))
        else:
            groups.append(fate)
    needs = {"clippable_linear": wrapped, "text_model_adapter": renamed}
    loads = len(keys) - len(groups)
    adapted_layers = any(key.is_update and key.layer for key in keys)
    groups += [*idle, *_missing(fitting, expected, base)]
    if not groups and _is_zero(found.file, keys):
        groups = [Group("no effect", _UNTRAINED, keys[0].entry.name, harmless=True)] * len(keys)
    return replace(
        found,
        model=base.name,
        architecture=type(base.model).__name__,
        loads=loads,
        needs=tuple(name for name, needed in needs.items() if needed and needs_patch(name)),
        groups=_merged_groups(groups),
        unchecked=unchecked,
        condition=_DEQUANTIZED if base.method == COMPRESSED and adapted_layers else "",
    )


def _is_zero(path: str, keys: Collection[_Key]) -> bool:
    """Whether the file is on this disk, and has pairs of ``lora_A`` and ``lora_B`` = 0 alone."""
    from safetensors import safe_open

    names = [key.entry.name for key in keys if key.part == "lora_B"]
    if {key.part for key in keys} != {"lora_A", "lora_B"} or not os.path.isfile(path):
        return False
    with safe_open(path, "pt") as file:
        return not any(file.get_tensor(name).any() for name in names)


def _merged_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    merged: dict[tuple[str, str], Group] = {}
    for group in groups:
        first = merged.get((group.kind, group.reason))
        group = group if first is None else replace(first, count=first.count + 1)
        merged[group.kind, group.reason] = group
    return tuple(sorted(merged.values(), key=lambda each: (each.kind == "ignored", -each.count)))


def _expected(
    found: AdapterInspection,
    config: Mapping[str, Any],
    targeted: Collection[str],
    base: BaseModel,
) -> tuple[dict[_Tensor, _Key], Group | None, str]:
    """What `_created` returns, why PEFT loads no tensor of this file, and why it is not known."""
    from peft import PeftType

    if not config:
        return {}, None, f"there is no {ADAPTER_CONFIG}"
    peft_type = config.get("peft_type")
    if peft_type not in {str(each.value) for each in PeftType}:
        why = f"{ADAPTER_CONFIG} has peft_type {peft_type!r}, which the installed PEFT lacks"
        return {}, Group("refused", why, found.file), ""
    try:
        return _created(config, targeted, base), None, ""
    except Exception as error:
        # PEFT refuses the config for this model; DoRA fails on the packed weights of QAT.
        refused = isinstance(error, (ValueError, IndexError))
        if refused or (base.method == QAT and config.get("use_dora")):
            return {}, Group("refused", f"PEFT raises {reason(error)}", found.file), ""
        # some methods of PEFT compute with the weights
        method = f"{found.kind} without the model's weights ({type(error).__name__})"
        return {}, None, f"PEFT cannot create {method}"


def _name_in_model(layer: str, base: BaseModel) -> str:
    """This model's name for a layer that another class of the same model names differently."""
    if layer not in base.modules and base.model.config.model_type.startswith("gemma4"):
        for own, other in _CLASSES:
            name = other + layer.removeprefix(own)
            if layer.startswith(own) and name in base.modules:
                return name
    return layer


def _created(
    config: Mapping[str, Any], targeted: Collection[str], base: BaseModel
) -> dict[_Tensor, _Key]:
    """The tensors that PEFT creates with this config.

    PEFT itself creates the adapter, on a copy of the model without weights.  Wrappers are left out
    of the targets, and the layers in them named, since PEFT alone refuses wrappers.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from torch import nn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = {name: base.inner(name) for name in targeted}
        outer = {re.escape(own): (own, n) for n, own in inner.items() if own not in inner}
        settings = PeftConfig.from_peft_type(**pinned(config, outer))
        changes: dict[str, Any] = {"init_lora_weights": False, "init_weights": False}
        if targeted:
            changes |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
            changes["target_modules"] = {*inner.values()}
        if pruned := config.get("peft_type") == "ADALORA" and bool(config.get("rank_pattern")):
            changes["rank_pattern"] = {}  # needs the weights
        for name in changes.keys() & vars(settings).keys():
            setattr(settings, name, changes[name])
        if base.method == QAT:
            model = copy.deepcopy(base.model)  # has other layers, and no weights
        else:
            model = on_meta(type(base.model), base.model.config)
        model = PeftModel(model, settings, low_cpu_mem_usage=True)
        saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    needed = [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if hasattr(module, "adapter_state_dict_load_map")
        for own in module.adapter_state_dict_load_map("default")
    ]
    kinds = {
        **dict.fromkeys(model.state_dict(), ""),
        **dict.fromkeys(saved, "missing"),
        **dict.fromkeys(needed, "refused"),
    }
    shapes = {} if pruned else {n: tuple(t.shape) for n, t in (model.state_dict() | saved).items()}
    idle = set()
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        # The magnitudes of DoRA change the output without an update, too.
        if isinstance(scaling, dict) and not any(scaling.values()) and not config.get("use_dora"):
            idle.add(name)
        for tokens in getattr(module, "token_indices", {}).values():
            layer = module.get_base_layer()
            if not isinstance(layer, (nn.Embedding, nn.Linear)):
                raise ValueError(f"no tokens of a {type(layer).__name__} can be trained")
            rows = len(layer.weight)
            if outside := [token for token in tokens if not -rows <= token < rows]:
                raise IndexError(f"token {outside[0]} is not one of the {rows} of the model")
    created = {}
    for name, kind in kinds.items():
        key = _Key.of(Entry(name, "", shapes.get(name, ()), 0, Path()))
        layer = name.partition(f".{key.part}")[0]
        created[key.tensor(base)] = replace(key, kind=kind, idle=layer in idle)
    return created


def _fate(
    key: _Key,
    adapted: Collection[str] | None,
    made: _Key | None,
    complete: bool,
    base: BaseModel,
) -> Group | None:
    """Why a tensor, for which PEFT creates ``made``, does not load; ``None`` if it does."""
    name = key.entry.name
    if not key.layer:  # shared by all layers
        return None
    if key.layer not in base.modules:
        return _absent(key, base)
    if not name.startswith(_PREFIX):
        reason = (
            f"PEFT ignores names that do not begin with {_PREFIX!r}: put that before each name, or "
            "load the file with transformers' model.load_adapter"
        )
        return Group("ignored", reason, name)
    if key.is_named and holds("peft<0.21"):
        reason = "their names contain an adapter's name, and this PEFT expects none"
        return Group("ignored", reason, name)
    layer = base.inner(key.layer) if key.method else key.layer
    if adapted is not None and key.is_update and layer not in adapted:
        return Group("ignored", "target_modules does not name these layers", name)
    is_own = not key.method and getattr(base.modules[layer], key.part, None) is not None
    if complete and not is_own and made is None:
        reason = (
            f"{ADAPTER_CONFIG} does not ask for them, so PEFT creates none: use the config that "
            "the adapter was trained with"
        )
        return Group("ignored", reason, name)
    return _misshapen(key, base.modules[layer], made.entry.shape if made else ())


def _missing(
    keys: Collection[_Key], expected: Mapping[_Tensor, _Key], base: BaseModel
) -> Iterator[Group]:
    """The expected tensors that the file lacks, in towers of which it has some layers.

    An adapter that was trained without a tower has none of its layers, and none is expected.
    """

    held = {key.tensor(base) for key in keys}
    towers = {tower_of("")}  # of what all layers share
    for key in keys:
        made = expected.get(key.tensor(base))
        if (key.method and key.layer in base.modules) or (made and made.kind == "missing"):
            towers.add(tower_of(key.layer))
    shared = shared_layers(base.model.config)
    for tensor, key in expected.items():
        if not key.kind or tensor in held:
            continue
        if key.kind == "refused":
            reason = "PEFT does not find them in the file, and raises KeyError"
            yield Group(key.kind, reason, key.entry.name)
        elif tower_of(key.layer) in towers and not is_shared_kv(key.layer, shared):
            reason = "the file lacks them: PEFT begins with new ones, which are not trained"
            yield Group(key.kind, reason, key.entry.name)


def _absent(key: _Key, base: BaseModel) -> Group:
    """Why the model has no module of this name."""
    shared = shared_layers(base.model.config)
    if is_shared_kv(key.layer, shared):
        reason = f"layers {shared[0]} to {shared[-1]} reuse the keys and values of earlier layers"
        return Group("ignored", f"{reason}: no effect", key.entry.name, harmless=True)
    reason = f"{tower_of(key.layer)}: the model has no such layers"
    return Group("ignored", reason, key.entry.name)


def _misshapen(key: _Key, module: Any, made: tuple[int, ...]) -> Group | None:
    """Whether a tensor has another shape than its layer needs, or than PEFT has ``made``."""
    name, shape = key.entry.name, key.entry.shape
    reason = "the widths differ: the adapter is for another model"
    axis, attribute = _AXES.get(key.part, (0, ""))
    width = getattr(module, attribute, None)
    if not key.method and (own := getattr(module, key.part, None)) is not None:
        made = tuple(own.shape)
    if made == shape:
        return None
    if width is not None and axis < len(shape) and shape[axis] != width:
        return Group("refused", reason, f"{name}: width {shape[axis]}, the layer has {width}")
    if not made:
        return None
    if width is not None and len(shape) == 2 == len(made) and made[axis] == shape[axis]:
        reason = f"their rank is not {made[1 - axis]}, their rank in {ADAPTER_CONFIG}"
    elif key.part != "weight":
        reason = f"PEFT creates other shapes with this {ADAPTER_CONFIG}: use that of the training"
    return Group("refused", reason, f"{name}: shape {list(shape)}, not {list(made)}")


# -- what is printed ------------------------------------------------------------------------------


def _fit_lines(found: AdapterInspection) -> Iterator[str]:
    yield text.wrap(f"in {short_name(str(found.model))} ({found.architecture})")
    needs = with_patches(found.needs).removeprefix(", ") if found.loads else ""
    rows = [("loads", text.plural(found.loads, "tensor"), needs)]
    for group in found.groups:
        rows.append((group.kind, text.plural(group.count, "tensor"), group.reason))
    yield text.table(rows, indent="  ")
    for group in found.groups:
        if not group.harmless:
            example = group.example.removeprefix(_PREFIX).replace(".weight", "")
            yield text.wrap(f"{group.kind}, such as {example}", " " * 4, "  ")
    yield text.wrap(found.verdict)
