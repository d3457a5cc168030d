"""What vLLM or SGLang does with an adapter, tensor by tensor, and the adapter in their names.

``check_served`` is also the command ``gemma4-compat adapter DIR --model MODEL --for vllm``.  A
server reads the names of the tensors, not ``target_modules``.  A tensor whose name ends as a layer
that it adapts, but is not the name of one, is left out without an error.  The tables below are
those of the releases in ``SERVERS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import text
from ..errors import InputError, failures_of
from ..files.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Location,
    adapter_header,
    file_in,
    located,
    read_adapter_config,
)
from ..files.hub import Repository, short_name
from ..model.parts import is_shared_kv, shape_of, shared_layers, tower_of
from ..result import Result
from .adapter import Group, merged_groups
from .targets import PATTERNS, BaseModel, base_model_of, in_peft, looked_up, matching, pinned

#: the releases whose source these tables are from
SERVERS = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23"}
#: vLLM's hf_to_vllm_mapper: the beginnings of names in a checkpoint and in vLLM, used in this order
_NAMES = {
    "Gemma4ForConditionalGeneration": (
        ("model.vision_tower", "vision_tower"),
        ("model.embed_vision", "embed_vision"),
        ("model.audio_tower.", "audio_tower."),
        ("model.embed_audio.", "embed_audio."),
        ("model.language_model.", "language_model.model."),
        ("model", "language_model.model"),
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        ("model.embed_audio.", "embed_audio."),
        ("model.embed_vision.", "embed_vision."),
        ("model.language_model.", "language_model.model."),
        ("model.vision_embedder.", "vision_embedder."),
        ("model", "language_model.model"),
    ),
    "Gemma4ForCausalLM": (("model.language_model.", "model."),),
}
#: get_mm_mapping does not name this part of vLLM's model, so its layers are not adapted
_LEFT_OUT = "vision_embedder."
#: what --max-lora-rank takes, from its default on
_RANKS = (16, 32, 64, 128, 256, 320, 512)
#: the entries of adapter_config.json with which vLLM refuses an adapter
_REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "alora_invocation_tokens", "layer_replication",
    "use_bdlora", "use_qalora",
)  # fmt: skip
_INITIAL = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_SGLANG = (
    "its Gemma 4 reads the sizes of LoRA's buffers from the multimodal config, which has none, "
    "and has one size for all layers"
)
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.(?P<part>lora_[AB])(?P<adapter>\.\w+)?\.weight"
)
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<projection>\w+)")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
#: of vLLM's projections -> the parameters of transformers
_PARAMETERS = {"gate_proj": "gate_up_proj", "down_proj": "down_proj"}
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class ServedAdapter(Result):
    """What a server does with an adapter.

    ``applied`` tensors change the model as in PEFT if the server is started with ``options``;
    ``groups`` are the others.  ``kind`` of a group is "refused" (loading raises), "in part" or
    "ignored" (no error, and no effect).  ``exportable`` says whether an exported copy would be
    applied.  ``written`` is the folder of the copy that this result describes.
    """

    server: str
    file: str
    model: str
    architecture: str
    tensors: int
    applied: int
    options: tuple[str, ...]
    groups: tuple[Group, ...]
    exportable: bool
    written: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the server applies all that has an effect in PEFT."""
        return bool(self.applied) and all(group.harmless for group in self.groups)

    @property
    def verdict(self) -> str:
        if self.ok:
            return f"{self.server} applies it"
        fails = any(group.kind == "refused" for group in self.groups)
        what = "refuses it" if fails else "does NOT apply it as PEFT does, and raises no error"
        way = "--export FOLDER writes a copy that it applies" if self.exportable else (
            "serve the merged model instead: gemma4-compat merge"
        )  # fmt: skip
        return f"{self.server} {what}; {way}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "verdict": self.verdict}

    def _lines(self) -> Iterator[str]:
        yield text.wrap(f"{self.file} in {short_name(self.model)} ({self.architecture})")
        rows = [("applied", text.plural(self.applied, "tensor"), "")]
        rows += [(g.kind, text.plural(g.count, "tensor"), g.reason) for g in self.groups]
        yield text.table(rows, indent="  ")
        for group in self.groups:
            if not group.harmless:
                yield text.wrap(f"{group.kind}, such as {group.example}", " " * 4, "  ")
        yield text.wrap(self.verdict)
        if self.ok:
            adapter = f"--lora-modules NAME={self.written or self.file}"
            options = " ".join(("--enable-lora", *self.options, adapter))
            yield f"  vllm serve {self.model} {options}"


def check_served(
    path: Location, model: Any, server: str = "vllm", *, export: str | None = None
) -> ServedAdapter:
    """Say what a server does with each tensor of an adapter; optionally write a copy for it.

    Args:
        path: an adapter's folder or Hub id ("NAMESPACE/NAME").
        model: the checkpoint that is served: a folder or Hub id, of which only ``config.json`` is
            read, or a model.
        server: "vllm" or "sglang".
        export: a new folder for a copy with the names and tensors that vLLM needs.  The result
            then describes the copy.

    Raises:
        InputError: a file is missing or damaged, the model is not a Gemma 4, or the copy cannot be
            written.

    Example:
        >>> found = check_served("my-lora", "gemma-4-E2B-it")
        >>> found.ok, found.options
        (True, ('--enable-tower-connector-lora',))
    """
    folder, config, served = _read(path, model)
    if export is not None and server != "vllm":
        raise InputError("an adapter can be exported for vllm and for peft")
    header = adapter_header(folder)
    shapes = {name: entry.shape for name, entry in header.items()}
    written = None
    if export is not None:
        config = _write(Path(export), *for_vllm(_tensors(folder), config, served))
        shapes = {name: entry.shape for name, entry in adapter_header(export).items()}
        written = export
    applied, options, groups = _fates(shapes, config, served, server)
    fine = all(group.harmless for group in groups)
    return ServedAdapter(
        server=SERVERS[server],
        file=str(folder),
        model=served.name,
        architecture=served.architecture,
        tensors=len(shapes),
        applied=applied,
        options=options,
        groups=groups,
        exportable=not fine and server == "vllm" and _helps(shapes, config, served),
        written=written,
    )


def export_for_peft(path: Location, model: Any, export: str) -> None:
    """Write a copy of an adapter that was made for vLLM, with the names and tensors of PEFT.

    Raises:
        InputError: as in `check_served`, or PEFT's names cannot hold this adapter.
    """
    folder, config, served = _read(path, model)
    _write(Path(export), *for_peft(_tensors(folder), config, served))


def _read(path: Location, model: Any) -> tuple[Path | Repository, dict[str, Any], Served]:
    folder = located(path)
    config_file = file_in(folder, ADAPTER_CONFIG)
    if config_file is None:
        raise InputError(f"{folder}: no {ADAPTER_CONFIG}")
    return folder, read_adapter_config(config_file), Served.of(base_model_of(model))


def _tensors(folder: Path | Repository) -> dict[str, Any]:
    from safetensors.torch import load_file

    adapter_header(folder)  # refuses a damaged file with our message
    file = file_in(folder, ADAPTER_WEIGHTS)
    assert file is not None
    return dict(load_file(file))


def _write(out: Path, tensors: Tensors, config: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import save_file

    with failures_of(f"{out}: cannot be written"):
        out.mkdir()
        save_file({name: t.contiguous() for name, t in tensors.items()}, out / ADAPTER_WEIGHTS)
        (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return config


# -- the model in vLLM ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """The model that is served.

    ``layers`` are the layers that vLLM adapts, by its names, with the widths of their outputs and
    inputs; ``ends`` are the last steps of the names that it accepts.  ``own`` has the checkpoint's
    name for each of vLLM's.  ``keys`` are the projections, in the checkpoint's names, that compute
    the keys and the values.  ``shared`` layers have none.  ``experts`` are the numbers of experts.
    """

    name: str
    architecture: str
    base: BaseModel
    layers: Mapping[str, tuple[int, int]]
    ends: Collection[str]
    own: Mapping[str, str]
    keys: Collection[str]
    shared: range
    experts: Mapping[str, int]

    @classmethod
    def of(cls, base: BaseModel) -> Served:
        from torch import nn

        architecture = type(base.model).__name__
        if architecture not in _NAMES:
            known = ", ".join(_NAMES)
            raise InputError(f"{base.name}: a {architecture}, and not one of {known}")
        shared = shared_layers(base.model.config)
        layers: dict[str, tuple[int, int]] = {}
        keys, counts = set(), {}
        for name, module in base.modules.items():
            in_vllm = vllm_name(name, architecture)
            if type(module).__name__.endswith("Experts"):
                counts[name], double, width = shape_of(module.gate_up_proj)
                inner = shape_of(module.down_proj)[2]
                sizes = ((double // 2, width), (double // 2, width), (width, inner))
                for number in range(counts[name]):
                    for projection, size in zip(PROJECTIONS, sizes, strict=True):
                        layers[f"{in_vllm}.{number}.{projection}"] = size
            elif isinstance(module, nn.Linear) and name != "lm_head":
                if is_shared_kv(name, shared):
                    continue
                layers[in_vllm] = (module.out_features, module.in_features)
                values = name.replace(".k_proj", ".v_proj")
                if name.endswith(".self_attn.k_proj") and values not in base.modules:
                    keys.add(name)
                    layers[in_vllm.replace(".k_proj", ".v_proj")] = layers[in_vllm]
        return cls(
            name=base.name,
            architecture=architecture,
            base=base,
            layers={n: size for n, size in layers.items() if not n.startswith(_LEFT_OUT)},
            ends={name.rpartition(".")[2] for name in layers},
            own={vllm_name(name, architecture): name for name in base.modules},
            keys=keys,
            shared=shared,
            experts=counts,
        )

    def own_name(self, layer: str) -> str:
        """The checkpoint's name of a layer that an adapter names otherwise, or as vLLM does."""
        if (expert := _EXPERT.fullmatch(layer)) is not None:
            return f"{self.own_name(expert['experts'])}.{expert['number']}.{expert['projection']}"
        for start in ("", "model.", "model.language_model."):
            name = vllm_name(start + layer, self.architecture)
            if name in self.own:
                return self.base.inner(self.own[name])
        return layer


def vllm_name(name: str, architecture: str) -> str:
    """vLLM's name of a module that a checkpoint or an adapter names so."""
    for start, in_vllm in _NAMES[architecture]:
        if name.startswith(start):
            name = in_vllm + name.removeprefix(start)
    return name


# -- what a server does ---------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]


def _fates(
    shapes: Shapes, config: Mapping[str, Any], served: Served, server: str
) -> tuple[int, tuple[str, ...], tuple[Group, ...]]:
    """How many tensors are applied, the options that this needs, and the other tensors."""
    rank = max([config.get("r") or 8, *(config.get("rank_pattern") or {}).values()])
    whole = Group("refused", _SGLANG, "all") if server == "sglang" else _refusal(config, rank)
    unlike = _unlike_peft(shapes, config, served)
    fates = {name: whole or _fate(name, shapes, served) or unlike(name) for name in shapes}
    groups = [group for group in fates.values() if group is not None]
    options = []
    if any(fates[name] is None and tower_of(name) in ("vision", "audio") for name in shapes):
        options.append("--enable-tower-connector-lora")
    if rank > _RANKS[0]:
        options.append(f"--max-lora-rank {next((r for r in _RANKS if r >= rank), rank)}")
    return len(shapes) - len(groups), tuple(options), merged_groups(groups)


def _refusal(config: Mapping[str, Any], rank: int) -> Group | None:
    """Why vLLM refuses an adapter with this config."""
    entry = next((name for name in _REFUSED if config.get(name)), None)
    initial = config.get("init_lora_weights")
    if config.get("peft_type") != "LORA":
        entry = "peft_type"
    elif (config.get("bias") or "none") != "none":
        entry = "bias"
    elif isinstance(initial, str) and initial.lower() not in _INITIAL:
        entry = "init_lora_weights"
    elif rank > _RANKS[-1]:
        entry = "r"
    if entry is None:
        return None
    return Group("refused", f"{entry} is {config.get(entry)!r} in {ADAPTER_CONFIG}", "all")


def _fate(name: str, shapes: Shapes, served: Served) -> Group | None:
    """What vLLM does with a tensor, unless it applies it."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["adapter"]:
        return Group(
            "refused", "vLLM reads only names that end in lora_A.weight, lora_B.weight", name
        )
    layer = vllm_name(match["layer"], served.architecture)
    if layer.removesuffix(".base_layer").endswith(".experts"):
        return Group("refused", "all experts are in one tensor: vLLM takes one for each", name)
    if layer not in served.layers:
        if is_shared_kv(layer, served.shared):
            why = f"layers {served.shared[0]} to {served.shared[-1]} reuse earlier keys and values"
            return Group("ignored", f"{why}: no effect", name, harmless=True)
        if layer.rpartition(".")[2] in served.ends:
            return Group("ignored", "vLLM has no layer of this name, and does not say so", name)
        return Group("refused", "vLLM adapts no layers that are called so", name)
    part = match["part"]
    axis, pair = (1, "lora_B") if part == "lora_A" else (0, "lora_A")
    width, shape = served.layers[layer][axis], shapes[name]
    if len(shape) != 2 or shape[axis] != width:
        reason = "the widths differ: the adapter is for another model"
        return Group("refused", reason, f"{name}: {list(shape)}, not {width} wide")
    if name.replace(part, pair) not in shapes:
        reason = f"the file has no {pair} for them: vLLM raises, or applies neither"
        return Group("refused", reason, name)
    if served.own.get(layer) in served.keys and name.replace("k_proj", "v_proj") not in shapes:
        reason = "k_proj also computes the values of these layers: vLLM adapts the keys alone"
        return Group("in part", reason, name)
    if (expert := _EXPERT.fullmatch(match["layer"])) is not None:
        own = f".{expert['projection']}."
        if not all(name.replace(own, f".{other}.") in shapes for other in PROJECTIONS):
            return Group("refused", "an expert lacks one of its three projections", name)
    return None


def _unlike_peft(
    shapes: Shapes, config: Mapping[str, Any], served: Served
) -> Callable[[str], Group | None]:
    """A function that says what PEFT does otherwise with a tensor that vLLM applies."""
    base, targets = served.base, config.get("target_modules")
    named, adapted = (
        {*map(base.inner, matching(base, each))} if targets else set()
        for each in ({"target_modules": targets}, config)
    )

    def unlike(name: str) -> Group | None:
        match = _TENSOR.fullmatch(name)
        assert match is not None
        layer = match["layer"]
        names = (layer, in_peft(layer, config))
        rank = shapes[name][0 if match["part"] == "lora_A" else 1]
        if served.own_name(layer) in named - adapted:
            reason = "exclude_modules or layers_to_transform leaves them out: PEFT ignores them"
        elif rank != (looked_up(config, "rank_pattern", *names) or 8):  # PEFT's default
            reason = f"their rank is not the one in {ADAPTER_CONFIG}: PEFT raises"
        elif any(looked_up(config, w, layer) != looked_up(config, w, *names) for w in PATTERNS):
            reason = (
                "rank_pattern or alpha_pattern names the wrapper of these layers: vLLM does not "
                "find it, and scales the update otherwise"
            )
        else:
            return None
        return Group("in part", reason, name)

    return unlike


# -- the copy -------------------------------------------------------------------------------------


def _named(tensors: Tensors, served: Served) -> Iterator[tuple[str, str, str, Any, str]]:
    """Each tensor with its name, its layer and its part, in the names of the checkpoint.

    The last item is the name that the layer has in the adapter.
    """
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            yield name, "", "", tensor, ""
            continue
        was = match["layer"]
        inner = was.removesuffix(".base_layer")
        layer = served.own_name(inner) + was.removeprefix(inner)
        yield f"{_PREFIX}{layer}.{match['part']}.weight", layer, match["part"], tensor, was


def for_vllm(
    tensors: Tensors, config: Mapping[str, Any], served: Served
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the config of an adapter as vLLM needs them."""
    out: dict[str, Any] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, layer, part, tensor, was in _named(tensors, served):
        experts = layer.removesuffix(".base_layer")
        if experts in served.experts:
            parameter = _parameter(layer, config)
            for each, update in _split(parameter, part, tensor, served.experts[experts]):
                out[f"{_PREFIX}{experts}.{each}.{part}.weight"] = update
            for each in PROJECTIONS:
                if (each == "down_proj") == (parameter == "down_proj"):
                    own = f"{was.removesuffix('.base_layer')}.{parameter}"
                    names[rf"{experts}.\d+.{each}"] = (own,)
            continue
        out[name] = tensor
        names[layer] = (was, in_peft(was, config))
        if layer in served.keys:
            out.setdefault(name.replace("k_proj", "v_proj"), tensor.clone())
            names[layer.replace("k_proj", "v_proj")] = names[layer]
    _fill(out, served)
    return out, pinned(config, names)


def _parameter(layer: str, config: Mapping[str, Any]) -> str:
    """Which parameter this wrapper of PEFT adapts; if there are two, gate_up_proj is inside."""
    if layer.endswith(".base_layer"):
        return "gate_up_proj"
    targets = {target.rpartition(".")[2] for target in config.get("target_parameters") or ()}
    return "gate_up_proj" if targets == {"gate_up_proj"} else "down_proj"


def _split(parameter: str, part: str, tensor: Any, count: int) -> Iterator[tuple[str, Any]]:
    """The updates of all experts in a tensor of PEFT's, as its ``ParamWrapper`` reads it."""
    if part == "lora_A":
        updates = tensor.reshape(count, -1, tensor.shape[-1])
    else:
        updates = tensor.reshape(tensor.shape[0], -1, count).permute(2, 0, 1)
    for number, update in enumerate(updates):
        if parameter == "down_proj":
            yield f"{number}.down_proj", update.clone()
        else:
            gate, up = (update, update) if part == "lora_A" else update.chunk(2)
            yield f"{number}.gate_proj", gate.clone()
            yield f"{number}.up_proj", up.clone()


def _fill(tensors: dict[str, Any], served: Served) -> None:
    """Add updates of zero where an expert has some of its projections: vLLM needs all three."""
    for name, tensor in list(tensors.items()):
        match = _TENSOR.fullmatch(name)
        expert = _EXPERT.fullmatch(match["layer"]) if match else None
        if match is None or expert is None or expert["experts"] not in served.experts:
            continue
        for projection in PROJECTIONS:
            layer = f"{expert['experts']}.{expert['number']}.{projection}"
            out, width = served.layers[vllm_name(layer, served.architecture)]
            rank = tensor.shape[0 if match["part"] == "lora_A" else 1]
            shape = (rank, width) if match["part"] == "lora_A" else (out, rank)
            tensors.setdefault(f"{_PREFIX}{layer}.{match['part']}.weight", tensor.new_zeros(shape))


def for_peft(
    tensors: Tensors, config: Mapping[str, Any], served: Served
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the config of an adapter for vLLM as PEFT needs them.

    Raises:
        InputError: PEFT's names cannot hold this adapter.
    """
    import torch

    out: dict[str, Any] = {}
    experts: dict[str, dict[str, Any]] = {}
    names: dict[str, tuple[str, ...]] = {}
    named = {name: rest for name, *rest in _named(tensors, served)}
    for name, (layer, part, tensor, was) in named.items():
        if (expert := _EXPERT.fullmatch(layer)) is not None:
            experts.setdefault(expert["experts"], {})[f"{layer}.{part}"] = tensor
            for projection, own in _PARAMETERS.items():
                if was.endswith(f".0.{projection}"):
                    names[f"{expert['experts']}.{own}"] = (was,)
        elif layer.endswith(".v_proj") and layer.replace("v_proj", "k_proj") in served.keys:
            keys = named.get(name.replace("v_proj", "k_proj"), [None] * 4)[2]
            if keys is None or not torch.equal(tensor, keys):
                raise InputError(
                    f"{name}: one weight computes keys and values here, and PEFT "
                    "adapts it once; this adapter has two updates"
                )
        else:
            out[name] = tensor
            names[layer] = names[layer.removesuffix(".linear")] = (was,)
    for layer, updates in experts.items():
        for part in ("lora_A", "lora_B"):
            try:
                gate, up, down = (
                    torch.stack(
                        [updates[f"{layer}.{n}.{p}.{part}"] for n in range(served.experts[layer])]
                    )
                    for p in PROJECTIONS
                )
            except (KeyError, RuntimeError) as error:
                raise InputError(f"{layer}: not the same tensors for all experts") from error
            if part == "lora_A" and not torch.equal(gate, up):
                raise InputError(
                    f"{layer}: PEFT has one lora_A for gate_proj and up_proj, and "
                    "this adapter has two"
                )
            both = gate if part == "lora_A" else torch.cat([gate, up], 1)
            out[f"{_PREFIX}{layer}.base_layer.{part}.weight"] = _joined(both, part)
            out[f"{_PREFIX}{layer}.{part}.weight"] = _joined(down, part)
    changed = pinned(config, names)
    if experts:
        changed["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    return out, changed


def _joined(updates: Any, part: str) -> Any:
    """The updates of all experts in one tensor, as PEFT's ``ParamWrapper`` reads it."""
    if part == "lora_A":
        return updates.flatten(0, 1)
    return updates.permute(1, 2, 0).flatten(1, 2)


def _helps(shapes: Shapes, config: Mapping[str, Any], served: Served) -> bool:
    """Whether vLLM would apply an exported copy."""
    import torch

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        changed, config = for_vllm(tensors, config, served)
    except (RuntimeError, IndexError):  # the tensors are for another model
        return False
    found = {name: tuple(tensor.shape) for name, tensor in changed.items()}
    applied, _, groups = _fates(found, config, served, "vllm")
    return bool(applied) and all(group.harmless for group in groups)
