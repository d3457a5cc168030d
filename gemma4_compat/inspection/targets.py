"""Match an adapter's targets in a model, and show what ``target_modules`` matches.

``scan_targets`` is also the command ``gemma4-compat scan MODEL --targets q_proj,v_proj``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.status import State
from ..errors import InputError, suggestion
from ..files.checkpoint import LOCATIONS
from ..files.hub import short_name
from ..model import parts
from ..model.meta import checkpoint_model
from ..model.parts import TOWERS, is_under, tower_of
from ..results import text
from ..results.result import Result

#: the settings of a ``PeftConfig`` that decide which modules match
_SETTINGS = (
    "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern",
)  # fmt: skip
#: the beginning of the names that PEFT loads
PREFIX = "base_model.model."
#: what follows the name of the model's layer in the name of an adapter's tensor
ADAPTER_PART = re.compile(
    r"\.((lora|hada|lokr|oft|boft|ia3|vera|pvera|hra|fourierft|vblora|randlora|ln_tuning|c3a|road|"
    r"miss|bone|shira|poly|waveft|delora|gralora|osf|hira|lily)_|token_adapter)"
)
#: an adapter's name in a tensor's name; PEFT omits it when it saves
ADAPTERS_NAME = re.compile(r"(?<=\.lora_A|\.lora_B)\.(?!(weight|bias)$)[^.]+")
_SUPPORTED, _PATCHED = "supported", "needs the patch clippable_linear"
_REFUSED = "NOT supported by LoRA"
_WRAPS = "With clippable_linear (import gemma4_compat first) the adapter wraps the layer inside."


@dataclass(frozen=True)
class Matches:
    """How many modules of one class are matched in one tower.

    ``takes`` says whether PEFT can adapt this class: "supported", "needs the patch
    clippable_linear" or "NOT supported by LoRA".
    """

    tower: str
    name: str
    count: int
    takes: str


@dataclass(frozen=True)
class TargetScan(Result):
    """What the targets match.

    ``layers`` are the names of the layers that get an adapter; for a matched wrapper, the layer
    inside it.  ``parameters`` are those of a LoRA adapter of ``rank``.
    """

    model: str
    architecture: str
    targets: str | tuple[str, ...]
    matches: tuple[Matches, ...]
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
    def ok(self) -> bool:
        """Whether PEFT, with the patches in ``needs``, creates an adapter for these targets."""
        return bool(self.matches) and all(match.takes != _REFUSED for match in self.matches)

    @property
    def verdict(self) -> str:
        if not self.matches:
            return "no module matches: PEFT raises 'Target modules ... not found in the base model'"
        if not self.ok:
            return "PEFT does not support these targets"
        return f"PEFT supports these targets{with_patches(self.needs)}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "count": self.count, "ok": self.ok}

    def _lines(self) -> Iterator[str]:
        yield text.wrap(f"{short_name(self.model)} ({self.architecture})".strip())
        targets = self.targets if isinstance(self.targets, str) else text.some(self.targets)
        yield text.wrap(targets, " " * 9, "targets: ", breaks=True)
        yield ""
        if self.matches:
            rows = [(m.tower, m.name, m.count, m.takes) for m in self.matches]
            if len(rows) > 1:
                rows.append(("all", "", self.count, ""))
            yield text.table(rows, ("tower", "class", "modules", ""), right=(2,))
            yield ""
        for takes, advice in ((_PATCHED, _WRAPS), (_REFUSED, "Name the linear layers inside.")):
            names = (m.name for m in self.matches for _ in range(m.count) if m.takes == takes)
            if classes := Counter(names):
                counts = ", ".join(f"{count} {name}" for name, count in classes.items())
                error = "PEFT alone raises 'Target module ... is not supported'"
                yield text.wrap(f"{counts}: {error}. {advice}")
        if self.layers:
            yield text.wrap(
                f"LoRA of rank {self.rank} on {text.plural(len(self.layers), 'layer')}: "
                f"{self.parameters:,} parameters, {text.size(4 * self.parameters)} in float32"
            )
        for note in self.notes:
            yield text.wrap(note, " " * 6, "note: ")
        yield text.wrap(self.verdict)


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
        >>> [match.tower for match in scan.matches]
        ['language', 'vision', 'audio']
    """
    if rank < 1:
        raise InputError(f"rank must be at least 1, not {rank}")
    targets = target_modules if isinstance(target_modules, str) else tuple(target_modules)
    if not targets or not all(targets):
        raise InputError("target_modules is empty, or contains an empty name")
    base = base_model_of(model)
    matched = matching(base, {"target_modules": targets})
    layers: dict[str, int] = {}
    counted: Counter[tuple[str, str, str]] = Counter()
    for name in matched:
        inner = base.inner(name)
        number = lora_parameters(base.modules[inner], rank)
        takes = _REFUSED
        if number is not None:
            takes = _PATCHED if inner != name and needs_patch("clippable_linear") else _SUPPORTED
            layers[inner] = number
        counted[tower_of(name), type(base.modules[name]).__name__, takes] += 1
    matches = (Matches(tower, name, n, takes) for (tower, name, takes), n in counted.items())
    ordered = sorted(matches, key=lambda each: (TOWERS.index(each.tower), each.name))
    return TargetScan(
        model=base.name,
        architecture=type(base.model).__name__,
        targets=targets,
        matches=tuple(ordered),
        layers=tuple(layers),
        needs=("clippable_linear",) if any(m.takes == _PATCHED for m in ordered) else (),
        rank=rank,
        parameters=sum(layers.values()),
        notes=tuple(_notes(base, matched, targets)),
    )


# -- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseModel:
    """A model to match names in.

    ``modules`` maps names to modules; a layer that PEFT has wrapped stands under its own name,
    without the adapter.  ``method`` is the quantization of a checkpoint.
    """

    name: str
    model: Any
    modules: Mapping[str, Any]
    method: str | None = None

    def inner(self, name: str) -> str:
        """The name of the layer that gets the adapter if the module of this name matches."""
        inner = f"{name}.linear"
        return inner if inner in self.modules and parts.is_clippable(self.modules[name]) else name

    def peft_name(self, name: str) -> str:
        """The name that PEFT gives a tensor of an adapter's file when it saves it for this model.

        As with the patches ``clippable_linear`` and ``text_model_adapter``.  A name for which the
        model has no layer is returned as it is.
        """
        here = name.removeprefix(PREFIX)
        if self.model.config.model_type.startswith("gemma4"):
            text_only = here.replace("model.language_model.", "model.", 1)
            names = (here, text_only, re.sub(r"^model\.", "model.language_model.", text_only))
            here = next((each for each in names if layer_of(each) in self.modules), here)
        layer = layer_of(here)
        if layer not in self.modules:
            return name
        inner = self.inner(layer) if ADAPTER_PART.search(here) else layer
        return PREFIX + inner + ADAPTERS_NAME.sub("", here.removeprefix(layer))


def base_model_of(model: Any) -> BaseModel:
    """The model, or the one that a checkpoint's ``config.json`` describes, on the meta device."""
    method = None
    if isinstance(model, LOCATIONS):
        name = str(model)
        model, method = checkpoint_model(model)
    else:
        model = parts.base_of(model)
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
    return BaseModel(name, model, modules, method)


def layer_of(name: str) -> str:
    """The model's layer that a tensor of an adapter belongs to."""
    part = ADAPTER_PART.search(name)
    layer = name[: part.start()] if part else name.rpartition(".")[0]
    return layer.removeprefix(PREFIX).replace(".base_layer", "")


# -- matching -------------------------------------------------------------------------------------


def matching(base: BaseModel, settings: Mapping[str, Any]) -> list[str]:
    """The modules that PEFT matches with these settings of a ``PeftConfig``.

    Wrappers are matched themselves, as without the patch ``clippable_linear``.

    Raises:
        InputError: a pattern is not a regular expression, or PEFT refuses the settings.
    """
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    given = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    patterns = [
        name for which in ("rank_pattern", "alpha_pattern") for name in settings.get(which) or ()
    ]
    for each in (given.get("target_modules"), given.get("exclude_modules"), *patterns):
        if isinstance(each, str):
            check_expression(each)
    try:
        config = LoraConfig(**given)
    except ValueError as error:
        raise InputError(f"PEFT refuses the adapter's config: {error}") from error
    tuners_utils._maybe_include_all_linear_layers(config, base.model)
    exists = tuners_utils.check_target_module_exists

    def matches(name: str) -> bool:
        # For an excluded module the result is falsy, but neither False nor None.
        inner = exists(config, base.inner(name))
        return bool(exists(config, name) and (inner or inner in (False, None)))

    return [name for name in base.modules if matches(name)]


def check_expression(targets: str) -> None:
    """Raise `InputError` if targets are not a regular expression."""
    try:
        re.compile(targets)
    except re.error as error:
        raise InputError(f"{targets!r} is not a regular expression: {error}") from error


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


def with_patches(needs: Iterable[str]) -> str:
    """ ", with the patch clippable_linear"; empty if no patch is needed."""
    return f", with the patch {', '.join(needs)}" if needs else ""


def _notes(base: BaseModel, matched: list[str], targets: str | tuple[str, ...]) -> Iterator[str]:
    last_names = {name.rpartition(".")[2] for name in base.modules}
    for target in dict.fromkeys(() if isinstance(targets, str) else targets):
        if not matching(base, {"target_modules": [target]}):
            yield f"{target} matches no module of this model{suggestion(target, last_names)}"
    if matched and not any(tower_of(name) == "language" for name in matched):
        yield "the language model gets no adapter"
    if experts := parts.experts_without_adapter(base.modules, matched):
        names, layers = parts.target_parameters(experts)
        yield (
            f"the experts of {text.plural(layers, 'layer')} get no adapter: target_modules matches "
            "modules, and one parameter holds all experts of a layer. Set "
            f"target_parameters={names} in PEFT's config"
        )
