"""Inspect an adapter: ``inspect_adapter``, which is also the command ``adapter``."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.gate import holds
from ..errors import InputError, reason
from ..files import checkpoint
from ..files.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Entry, Header, Location
from ..files.hub import Repository, short_name
from ..model.meta import COMPRESSED, QAT, on_meta
from ..model.parts import TOWERS, is_shared_kv, shared_layers, tower_of
from ..results import text
from ..results.result import Result
from . import targets
from .targets import ADAPTER_PART, ADAPTERS_NAME, PREFIX, BaseModel, base_model_of, layer_of

_NO_PREFIX = f"PEFT ignores names that do not begin with {PREFIX!r}: put it before each name"
_NAMED = "their names contain an adapter's name, and this PEFT expects none"
_NOT_ASKED_FOR = (
    f"{ADAPTER_CONFIG} does not ask for them (see target_modules): use that of the training"
)
_SHAPES = f"PEFT creates other shapes for this model with this {ADAPTER_CONFIG}"
_UNTRAINED = "all values of lora_B are 0, as before training: the outputs are those of the model"
_ALPHA = f"{ADAPTER_CONFIG} gives their layers an alpha of 0: the layers' outputs are the model's"
_KEY_ERROR = "PEFT does not find them in the file, and raises KeyError"
_NEW = "the file lacks them: PEFT begins with new ones, which are not trained"
_DEQUANTIZED = (
    "if from_pretrained gets quantization_config=CompressedTensorsConfig(dequantize=True) "
    "(transformers 5.21 or later): else PEFT raises \"'Linear' object has no attribute 'weight'\""
)


@dataclass(frozen=True)
class Group:
    """Tensors with the same outcome for the same reason.

    ``kind`` is "ignored" (PEFT does not load the tensors), "no effect" (all ``lora_B`` are 0, or
    the layer's alpha is), "refused" (loading raises) or "missing" (with this
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

    ``kind`` is "LoRA", "DoRA" or PEFT's name of another method, and ``bytes`` the size of the
    tensors.  ``towers`` counts tensors and layers by part of the model, ``ranks`` layers by their
    rank.  If a model was given, ``loads`` tensors load into it with the patches in ``needs``
    applied, and ``groups`` are the others; else ``model`` is ``None``.  ``unchecked`` says why only
    names are checked, if so.  ``condition`` is how the model has to be loaded, if not as usual.
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
        """Whether the whole adapter loads, apart from harmless groups; true without a model."""
        return self.model is None or (self.loads > 0 and all(g.harmless for g in self.groups))

    @property
    def verdict(self) -> str:
        if self.model is None:
            return ""
        if self.ok:
            condition = self.condition and f", {self.condition}"
            unchecked = self.unchecked and f"; only names are checked: {self.unchecked}"
            return f"fits{targets.with_patches(self.needs)}{condition}{unchecked}"
        if any(group.kind == "refused" for group in self.groups):
            return "does NOT fit: loading it fails; use the model and the files of the training"
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
        if (names := self.target_modules) is not None:
            rows["targets"] = names if isinstance(names, str) else text.some(names)
        for label, value in rows.items():
            yield text.wrap(value, " " * 12, f"{label:<12}", breaks=label == "targets")
        yield ""
        towers = [(name, each["tensors"], each["layers"]) for name, each in self.towers.items()]
        yield text.table(towers, ("tower", "tensors", "layers"), right=(1, 2))
        if self.model is None:
            return
        yield ""
        yield text.wrap(f"in {short_name(self.model)} ({self.architecture})")
        needs = targets.with_patches(self.needs).removeprefix(", ") if self.loads else ""
        fates = [(g.kind, text.plural(g.count, "tensor"), g.reason) for g in self.groups]
        yield text.table([("loads", text.plural(self.loads, "tensor"), needs), *fates], indent="  ")
        for group in self.groups:
            if not group.harmless:
                example = group.example.removeprefix(PREFIX).replace(".weight", "")
                yield text.wrap(f"{group.kind}, such as {example}", " " * 4, "  ")
        yield text.wrap(self.verdict)


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
    if not any(map(ADAPTER_PART.search, header)) and not config.get("peft_type"):
        raise InputError(f"{file}: none of its tensors belongs to an adapter")
    kind = config.get("peft_type") or "LORA"
    if kind == "LORA":
        kind = "DoRA" if any("lora_magnitude_vector" in name for name in header) else "LoRA"
    entries = header.values()
    ranks = Counter(e.shape[0] for e in entries if re.search(r"\.lora_(embedding_)?A\b", e.name))
    tensors = Counter(map(tower_of, header))
    adapted = {layer_of(name) for name in header if ADAPTER_PART.search(name)}
    layers = Counter(map(tower_of, adapted))
    names = config.get("target_modules")
    found = AdapterInspection(
        file=file,
        kind=kind,
        base_model=config.get("base_model_name_or_path") or None,
        tensors=len(header),
        parameters=sum(entry.numel for entry in entries),
        bytes=sum(entry.bytes for entry in entries),
        dtypes=dict(sorted(Counter(entry.dtype for entry in entries).items())),
        towers={t: {"tensors": tensors[t], "layers": layers[t]} for t in TOWERS if tensors[t]},
        ranks=dict(sorted(ranks.items())),
        rank=config.get("r"),
        target_modules=tuple(sorted(names)) if isinstance(names, list) else names,
    )
    return found if model is None else _with_fit(found, header, config, base_model_of(model))


def _header_and_config(path: Location) -> tuple[str, Header, dict[str, Any]]:
    """The safetensors file, its header, and the content of ``adapter_config.json``."""
    if not isinstance(path, Repository) and os.path.isfile(path):
        beside = Path(path).parent / ADAPTER_CONFIG
        config = checkpoint.read_adapter_config(beside) if beside.is_file() else {}
        return str(Path(path)), checkpoint.read_header(path), config
    folder = checkpoint.located(path, "file or folder")
    config_file = checkpoint.file_in(folder, ADAPTER_CONFIG)
    header = checkpoint.adapter_header(folder)
    if config_file is None:
        raise InputError(f"{folder}: no {ADAPTER_CONFIG}, which PEFT needs")
    return str(folder / ADAPTER_WEIGHTS), header, checkpoint.read_adapter_config(config_file)


class _Created(NamedTuple):
    """A tensor that PEFT creates, or one of the model's own."""

    shape: tuple[int, ...] | None
    kind: str  # of the group if the file lacks it; empty if PEFT does not save it
    is_silent: bool  # whether its layer multiplies the adapter's output by 0


def _with_fit(
    found: AdapterInspection, header: Header, config: Mapping[str, Any], base: BaseModel
) -> AdapterInspection:
    """Compare the file's tensors with those that PEFT creates."""
    targeted = targets.matching(base, config) if config.get("target_modules") else []
    keys = {name: base.peft_name(name) for name in header}
    created: dict[str, _Created] = {}
    groups: list[Group] = []
    unchecked = "" if config else f"there is no {ADAPTER_CONFIG}"
    try:
        created = _created(config, base) if config else {}
    except Exception as error:
        # PEFT refuses the config for this model, or the packed weights of QAT.
        if isinstance(error, (ValueError, IndexError)) or base.method == QAT:
            why = f"PEFT raises {reason(error)}"
            groups = [Group("refused", why, name) for name in header]
        else:  # some methods compute with the weights
            unchecked = f"PEFT cannot create {found.kind} without weights ({type(error).__name__})"
    if not groups:
        problems = (_problem(header[name], key, created, base) for name, key in keys.items())
        groups = [problem for problem in problems if problem is not None]
    loads = len(header) - len(groups)
    groups += _missing({*keys.values()}, created, base)
    if not groups and _is_zero(found.file, header):
        groups = [Group("no effect", _UNTRAINED, name, harmless=True) for name in header]
    else:
        silent = (name for name, key in keys.items() if key in created and created[key].is_silent)
        groups += (Group("no effect", _ALPHA, name, harmless=True) for name in silent)
    counts = Counter((group.kind, group.reason) for group in groups)
    firsts = {(group.kind, group.reason): group for group in reversed(groups)}
    merged = [replace(firsts[key], count=count) for key, count in counts.items()]
    needs = {patch for name, key in keys.items() for patch in _patches(name, key)}
    if any(base.inner(name) != name for name in targeted):
        needs.add("clippable_linear")
    return replace(
        found,
        model=base.name,
        architecture=type(base.model).__name__,
        loads=loads,
        needs=tuple(filter(targets.needs_patch, sorted(needs))),
        groups=tuple(sorted(merged, key=lambda g: (g.kind == "ignored", -g.count))),
        unchecked=unchecked,
        condition=_DEQUANTIZED if base.method == COMPRESSED and targeted else "",
    )


def _patches(name: str, key: str) -> Iterator[str]:
    """The patches that rename a tensor of the file to the name ``key`` of this model."""
    if (".linear." in name) != (".linear." in key):
        yield "clippable_linear"
    if (".language_model." in name) != (".language_model." in key):
        yield "text_model_adapter"


def _created(config: Mapping[str, Any], base: BaseModel) -> dict[str, _Created]:
    """The tensors of a copy of the model, without weights, on which PEFT creates the adapter."""
    from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict

    if (peft_type := config.get("peft_type")) not in PeftType.__members__:
        raise ValueError(f"it does not know peft_type {peft_type!r} of {ADAPTER_CONFIG}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = PeftConfig.from_peft_type(**config)
        for name in vars(settings).keys() & {"init_lora_weights", "init_weights"}:
            setattr(settings, name, False)
        if base.method == QAT:  # its layers are others, and have no weights
            model = copy.deepcopy(base.model)
        else:
            model = on_meta(type(base.model), base.model.config)
        model = PeftModel(model, settings, low_cpu_mem_usage=True)
        saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = {n: tuple(each.shape) for n, each in (model.state_dict() | saved).items()}
    kinds = dict.fromkeys(shapes, "") | dict.fromkeys(saved, "missing")
    silent: tuple[str, ...] = ()
    for name, module in model.named_modules():
        scaling = vars(module).get("scaling")
        silent += (f"{name}.",) if isinstance(scaling, dict) and 0 in scaling.values() else ()
        if hasattr(module, "adapter_state_dict_load_map"):
            needed = module.adapter_state_dict_load_map("default")
            kinds |= {f"{name}.{own}": "refused" for own in needed}
        for tokens in getattr(module, "token_indices", {}).values():
            if base.method == QAT:
                raise ValueError("no tokens of a QAT checkpoint can be trained")
            rows = len(module.get_base_layer().weight)
            if not all(-rows <= token < rows for token in tokens):
                raise IndexError(f"trainable_token_indices: the model has {rows} tokens")
    return {n: _Created(shapes.get(n), kind, n.startswith(silent)) for n, kind in kinds.items()}


def _problem(entry: Entry, key: str, created: dict[str, _Created], base: BaseModel) -> Group | None:
    """Why a tensor of the file does not load."""
    name, made = entry.name, created.get(key)
    is_in_model = layer_of(key) in base.modules
    if not is_in_model and made is None:
        shared = shared_layers(base.model.config)
        if is_shared_kv(name, shared):
            why = f"layers {shared[0]} to {shared[-1]} reuse the keys and values of earlier layers"
            return Group("ignored", f"{why}: no effect", name, harmless=True)
        return Group("ignored", f"{tower_of(name)}: the model has no such layers", name)
    ignored = "refused" if "text_model_adapter" in _patches(name, key) else "ignored"
    if is_in_model and not name.startswith(PREFIX):
        return Group(ignored, _NO_PREFIX, name)
    if ADAPTERS_NAME.search(name) and holds("peft<0.21"):
        return Group(ignored, _NAMED, name)
    if made is None:
        return Group(ignored, _NOT_ASKED_FOR, name) if created else None
    if made.shape not in (None, entry.shape):
        return Group("refused", _SHAPES, f"{name}: shape {entry.shape}, not {made.shape}")
    return None


def _missing(
    held: Collection[str], created: dict[str, _Created], base: BaseModel
) -> Iterator[Group]:
    """The tensors that the file lacks, in towers of which it has some layers of this model."""
    saved = {key for key, made in created.items() if made.kind}
    adapted = {key for key in held if ADAPTER_PART.search(key) and layer_of(key) in base.modules}
    towers = {tower_of(key) for key in adapted | saved.intersection(held)} | {tower_of("")}
    shared = shared_layers(base.model.config)
    for key, made in created.items():
        if key in held or not made.kind or is_shared_kv(key, shared):
            continue
        if made.kind == "refused":
            yield Group(made.kind, _KEY_ERROR, key)
        elif tower_of(key) in towers:
            yield Group(made.kind, _NEW, key)


def _is_zero(path: str, header: Header) -> bool:
    """Whether the file is on this disk, and has pairs of ``lora_A`` and ``lora_B`` = 0 alone."""
    from safetensors import safe_open

    if not os.path.isfile(path) or not all(re.search(r"\.lora_[AB]\b", name) for name in header):
        return False
    with safe_open(path, "pt") as file:
        return not any(file.get_tensor(name).any() for name in header if ".lora_B" in name)
