"""Show what a ``target_modules`` setting matches in a model, before an adapter is made.

``scan_targets`` is also the command ``gemma4-compat scan MODEL --targets q_proj,v_proj``.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from .. import text
from ..engine.status import State
from ..errors import InputError, suggestion
from ..model.files import LOCATIONS
from ..model.hub import short_name
from ..model.meta import checkpoint_model
from ..model.parts import (
    TOWERS,
    experts_without_adapter,
    is_clippable,
    is_shared_kv,
    is_under,
    shared_layers,
    target_parameters,
    tower_of,
)
from ..result import Result

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Matches:
    """How many modules of one class are matched in one tower.

    ``takes`` says whether PEFT can adapt this class: "yes", "patched" (with the patch
    ``clippable_linear``) or "no".
    """

    tower: str
    name: str
    count: int
    takes: str


@dataclass(frozen=True)
class TargetScan(Result):
    """What the targets match.

    ``layers`` are the names of the layers that get an adapter; for a matched wrapper, the layer
    inside it.  ``by_target`` counts the matches of each target in a list, and is empty for a
    regular expression or "all-linear".  ``parameters`` and ``bytes`` are the size of a LoRA adapter
    of ``rank`` in float32, the dtype in which PEFT creates it.
    """

    model: str
    architecture: str
    quantised: str | None
    targets: str | tuple[str, ...]
    matches: tuple[Matches, ...]
    by_target: Mapping[str, int]
    layers: tuple[str, ...]
    needs: tuple[str, ...]
    rank: int
    parameters: int
    notes: tuple[str, ...]

    @property
    def count(self) -> int:
        """All matched modules; a wrapper and its inner layer count as two if both match."""
        return sum(match.count for match in self.matches)

    @property
    def bytes(self) -> int:
        return 4 * self.parameters

    @property
    def ok(self) -> bool:
        """Whether PEFT, with the patches in ``needs``, creates an adapter for these targets."""
        return bool(self.matches) and all(match.takes != "no" for match in self.matches)

    @property
    def verdict(self) -> str:
        if not self.matches:
            return "no module matches: PEFT raises 'Target modules ... not found in the base model'"
        if not self.ok:
            return "PEFT does not support these targets"
        return "PEFT supports these targets" + (
            f", with the patch {', '.join(self.needs)}" if self.needs else ""
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "matches": [
                {"tower": m.tower, "class": m.name, "count": m.count, "takes": m.takes}
                for m in self.matches
            ],
            "count": self.count,
            "bytes": self.bytes,
            "ok": self.ok,
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def scan_targets(
    model: Any, target_modules: str | Collection[str], *, rank: int = 16
) -> TargetScan:
    """Match targets in a model as PEFT does; nothing is changed and no weight is read.

    Args:
        model: a checkpoint's folder or Hub id ("google/gemma-4-E4B-it", or with a revision,
            "google/gemma-4-E4B-it@main"), of which only ``config.json`` is read, or a model.
        target_modules: as in PEFT: a list of names, a regular expression, or "all-linear".
        rank: the rank of the LoRA adapter whose parameters are counted.

    Raises:
        InputError: the checkpoint has no readable ``config.json``.
        InputError: the targets, the rank or the model are invalid.

    Example:
        >>> scan = scan_targets("gemma-4-E2B-it", ["q_proj", "v_proj"])
        >>> print(scan.verdict)
        PEFT supports these targets...
        >>> scan.by_target["q_proj"] >= 35
        True
    """
    if rank < 1:
        raise InputError(f"rank must be at least 1, not {rank}")
    targets = target_modules if isinstance(target_modules, str) else tuple(target_modules)
    if not targets or not all(targets):
        raise InputError("target_modules is empty, or contains an empty name")
    base = base_model_of(model)
    matched = matching(base, SimpleNamespace(target_modules=targets))
    needed = needs_patch("clippable_linear")
    layers: dict[str, Any] = {}
    counted: Counter[tuple[str, str, str]] = Counter()
    parameters = 0
    for name in matched:
        inner = base.inner(name)
        module = base.modules[inner]
        number = lora_parameters(module, rank)
        takes = "no" if number is None else "patched" if inner != name and needed else "yes"
        counted[tower_of(name), type(base.modules[name]).__name__, takes] += 1
        if number is not None and inner not in layers:
            layers[inner] = module
            parameters += number
    order = sorted(counted, key=lambda key: (TOWERS.index(key[0]), key[1]))
    by_target = {}
    if not isinstance(targets, str):
        by_target = {
            target: len(matching(base, SimpleNamespace(target_modules=(target,))))
            for target in sorted(set(targets), key=targets.index)
        }
    matches = tuple(Matches(t, name, counted[t, name, takes], takes) for t, name, takes in order)
    return TargetScan(
        model=base.name,
        architecture=base.architecture,
        quantised=base.quantised,
        targets=targets,
        matches=matches,
        by_target=by_target,
        layers=tuple(layers),
        needs=("clippable_linear",) if any(m.takes == "patched" for m in matches) else (),
        rank=rank,
        parameters=parameters,
        notes=tuple(_notes(base, matched, by_target)),
    )


def parse_targets(text: str) -> str | tuple[str, ...]:
    """The value of ``--targets``: plain names with commas between them are a list.

    They may be in brackets and quotes, as in ``adapter_config.json``.
    """
    text = text.strip()
    if names := re.fullmatch(r"\[([\w.,\s\"'-]+)\]", text):
        text = re.sub(r"[\"']", "", names[1]).strip()
    if text.lower() != ALL_LINEAR and re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)*", text):
        return tuple(name.strip() for name in text.split(","))
    return text


# -- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseModel:
    """A model to match names in.

    ``modules`` maps names to modules; a layer that PEFT has wrapped stands under its own name,
    without the adapter.  ``shared`` are the numbers of the decoder layers that share keys and
    values.
    """

    name: str
    architecture: str
    quantised: str | None
    model: Any
    modules: Mapping[str, Any]
    shared: range

    def inner(self, name: str) -> str:
        """The name of the layer that gets the adapter if the module of this name matches."""
        inner = f"{name}.linear"
        return inner if inner in self.modules and is_clippable(self.modules[name]) else name


def base_model_of(model: Any) -> BaseModel:
    """The model, or the one that a checkpoint's ``config.json`` describes, on the meta device."""
    quantised: str | None = None
    if isinstance(model, LOCATIONS):
        name = str(model)
        model, quantised = checkpoint_model(model)
    else:
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        method = getattr(model, "quantization_method", None)
        quantised = None if method is None else str(getattr(method, "value", method))
        name = str(getattr(model, "name_or_path", ""))
    modules: dict[str, Any] = {}
    adapted: list[str] = []
    for path, module in model.named_modules():
        if not path or is_under(path, adapted[-1:]):
            continue
        if hasattr(module, "get_base_layer"):  # a layer of PEFT
            adapted.append(path)
            module = module.get_base_layer()
        modules[path] = module
    return BaseModel(
        name, type(model).__name__, quantised, model, modules, shared_layers(model.config)
    )


# -- matching -------------------------------------------------------------------------------------


def matching(base: BaseModel, config: SimpleNamespace) -> list[str]:
    """The modules that PEFT matches with these settings of a ``PeftConfig``.

    Wrappers are matched themselves, as without the patch ``clippable_linear``.

    Raises:
        InputError: the targets are not a regular expression, or need PEFT, which is not installed.
    """
    for expression in (config.target_modules, getattr(config, "exclude_modules", None)):
        if isinstance(expression, str):
            check_expression(expression)
    return list(_matching(base, config))


def check_expression(targets: str) -> None:
    """Check that targets are a regular expression.

    Raises:
        InputError: they are not.
    """
    try:
        re.compile(targets)
    except re.error as error:
        raise InputError(f"{targets!r} is not a regular expression: {error}") from error


def _matching(base: BaseModel, config: SimpleNamespace) -> Iterator[str]:
    targets = config.target_modules
    if importlib.util.find_spec("peft") is None:
        if targets == ALL_LINEAR:
            raise InputError(f"{ALL_LINEAR} needs peft, which defines it: install peft")
        yield from (name for name in base.modules if _plain_match(targets, name))
        return
    from peft.tuners import tuners_utils

    settings = {
        "exclude_modules": None,
        "modules_to_save": None,
        "target_parameters": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "task_type": None,
        "peft_type": "LORA",
        **vars(config),
    }
    if not isinstance(targets, str):
        settings["target_modules"] = set(targets)
    asked: Any = SimpleNamespace(**settings)
    tuners_utils._maybe_include_all_linear_layers(asked, base.model)
    matches = tuners_utils.check_target_module_exists
    yield from (name for name in base.modules if matches(asked, name))


def _plain_match(targets: str | Iterable[str], name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def needs_patch(name: str) -> bool:
    """Whether the installed libraries have the bug of this patch, or may have it."""
    from .. import status

    return status()[name].state is not State.FIXED


def lora_parameters(module: Any, rank: int) -> int | None:
    """The parameters of a LoRA adapter on this module; ``None`` if PEFT does not support it."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return rank * int(module.in_features + module.out_features)
    if isinstance(module, nn.Embedding):
        return rank * int(module.num_embeddings + module.embedding_dim)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and rank % module.groups == 0:
        window: int = math.prod(module.kernel_size)
        narrow = rank // int(module.groups)
        return rank * int(module.in_channels) * window + narrow * int(module.out_channels)
    return None


# -- what is printed ------------------------------------------------------------------------------


def _notes(base: BaseModel, matched: list[str], by_target: Mapping[str, int]) -> Iterator[str]:
    last_names = {name.rpartition(".")[2] for name in base.modules}
    for target, count in by_target.items():
        if not count:
            yield f"{target} matches no module of this model{suggestion(target, last_names)}"
    towers = {tower_of(name) for name in matched}
    if towers and "language" not in towers:
        inner = all(name.endswith(".linear") for name in matched)
        yield "the language model gets no adapter" + (
            ": only the vision and audio towers have layers named '.linear'" if inner else ""
        )
    shared = [name for name in matched if is_shared_kv(name, base.shared)]
    if shared:
        yield (
            f"{text.plural(len(shared), 'module')} in layers that share keys and values: "
            "transformers >= 5.5.2 does not have these modules, and drops their adapters"
        )
    experts = experts_without_adapter(base.modules, matched)
    if experts:
        names, layers = target_parameters(experts)
        yield (
            f"the experts of {text.plural(layers, 'layer')} get no adapter: target_modules matches "
            "modules, and one parameter holds all experts of a layer. Set "
            f"target_parameters={names} in PEFT's config"
        )
    if base.quantised not in (None, "bitsandbytes"):
        yield f"quantised with {base.quantised}: the classes shown are the unquantised model's"


def _lines(scan: TargetScan) -> Iterator[str]:
    name = short_name(scan.model)
    quantised = f", {scan.quantised}" if scan.quantised else ""
    yield f"{name} ({scan.architecture}{quantised})".strip()
    targets = scan.targets if isinstance(scan.targets, str) else text.some(scan.targets)
    yield text.wrap(targets, " " * 9, "targets: ", breaks=True)
    yield ""
    if not scan.matches:
        yield from _note_lines(scan)
        yield scan.verdict
        return
    verdicts = {
        "yes": "supported",
        "patched": "needs the patch clippable_linear",
        "no": "NOT supported by LoRA",
    }
    rows = [(m.tower, m.name, m.count, verdicts[m.takes]) for m in scan.matches]
    if len(rows) > 1:
        rows.append(("all", "", scan.count, ""))
    yield text.table(rows, ("tower", "class", "modules", ""), right=(2,))
    yield ""
    classes: Counter[str] = Counter()
    for match in scan.matches:
        if match.takes == "patched":
            classes[match.name] += match.count
    if classes:
        counts = ", ".join(f"{count} {name}" for name, count in classes.items())
        yield text.wrap(
            f"{counts}: PEFT alone raises 'Target module ... is not supported'. With "
            "clippable_linear (import gemma4_compat first) the adapter wraps the layer inside."
        )
    refused = sorted({match.name for match in scan.matches if match.takes == "no"})
    if refused:
        yield text.wrap(
            f"{', '.join(refused)}: PEFT raises 'Target module ... is not supported'. Name the "
            "linear layers inside."
        )
    if scan.layers:
        yield text.wrap(
            f"LoRA of rank {scan.rank} on {text.plural(len(scan.layers), 'layer')}: "
            f"{scan.parameters:,} parameters, {text.size(scan.bytes)} in float32"
        )
    yield from _note_lines(scan)
    yield scan.verdict


def _note_lines(scan: TargetScan) -> Iterator[str]:
    for note in scan.notes:
        yield text.wrap(note, " " * 6, "note: ")
