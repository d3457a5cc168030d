"""Inspect a loaded model: the placement of its parts, and what is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from .. import status
from ..engine.patch import FAST_MEANS
from ..model.hooks import input_device
from ..model.parts import base_of, is_ours
from ..patches import load
from ..results.result import Result
from ..results.text import plural, size, some, table, wrap
from ..runtime.facts import at_work, how_it_decodes
from .loaded import Loaded, Part, Problem, device_text

_FAST = f"faster patches, which {FAST_MEANS},"


@dataclass(frozen=True)
class ModelInspection(Result):
    """The placement of a loaded model, and what is wrong with it; see `inspect_model`.

    ``input_device`` is where the inputs belong.  ``offloaded`` counts modules that accelerate
    onloads for each forward, by "disk to cuda:0".  ``at_work`` says which patches make that faster,
    and how.  ``fast`` holds the patches of that kind, each with its state: "applied" or "optional".
    ``adapters`` are bytes by name, part of the model and device; ``active`` names those in use.
    """

    model: str
    base: str
    quantization: str | None
    input_device: str | None
    decoding: str | None
    at_work: Mapping[str, str]
    fast: Mapping[str, str]
    parts: tuple[Part, ...]
    offloaded: Mapping[str, int]
    adapters: Mapping[str, Mapping[str, Mapping[str, int]]]
    active: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems

    @property
    def verdict(self) -> str:
        return "nothing is damaged" if self.ok else plural(len(self.problems), "problem")

    @property
    def bytes(self) -> dict[str, int]:
        """The size of the whole model by device: weights, quant states and adapters."""
        of_parts = (part.weights for part in self.parts)
        of_adapters = (numbers for parts in self.adapters.values() for numbers in parts.values())
        total: Counter[str] = Counter()
        for numbers in (*of_parts, *of_adapters):
            total.update(numbers)
        return dict(sorted(total.items()))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes, "ok": self.ok}

    def _lines(self) -> Iterator[str]:
        yield wrap(self.base if self.model == self.base else f"{self.base} in {self.model}")
        yield self.quantization or "not quantized"
        if self.input_device is not None:
            yield f"inputs go to {self.input_device}"
        yield ""
        head = ["part", "linear layers", "runs on", "stored on", "weights"]
        yield table([*_part_rows(self)], head, right=(4,))
        if self.adapters:
            yield ""
            rows = [
                (name if name in self.active else f"{name} (not active)", part, device, size(n))
                for name, parts in self.adapters.items()
                for part, by_device in parts.items()
                for device, n in by_device.items()
            ]
            yield table(rows, ["adapter", "part", "stored on", "weights"], right=(3,))
        yield ""
        for kind, text in _messages(self):
            yield wrap(text, " " * 9, f"{kind:<9}")
        yield wrap(self.verdict)

    __repr__ = Result.__str__


def inspect_model(model: Any) -> ModelInspection:
    """Inspect the placement of a loaded model; nothing is moved, loaded or changed.

    Works for plain models and ``PeftModel``, on one device or several, quantized or not.  Tensors
    without values are damaged: 4-bit layers whose quant state is on meta, and tensors of the model
    or of an adapter that are on meta without a hook that onloads them.  It is also a problem if 4
    or 8 bit were requested and no linear layer is quantized.

    Args:
        model: a ``torch.nn.Module``, also inside ``torch.compile`` or ``DataParallel``.  Input
            device and adapters are reported for a transformers or PEFT model only.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.

    Example:
        >>> inspection = inspect_model(model)
        >>> inspection.ok
        True
        >>> inspection.problems
        ()
    """
    from accelerate.utils import extract_model_from_parallel
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect_model needs a torch.nn.Module, not {type(model).__name__}")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    base = base_of(model)
    loaded = Loaded(model)
    config = getattr(getattr(base, "config", None), "quantization_config", None)
    quantization = _quantization(config)
    if hasattr(base, "ct_decompress_hook"):
        quantization = f"{quantization}: all weights become bfloat16 in the first forward"
    inputs = None
    with suppress(TypeError, ValueError, AttributeError):
        inputs = device_text(input_device(model))
    return ModelInspection(
        model=type(model).__name__,
        base=type(base).__name__,
        quantization=quantization,
        input_device=inputs,
        decoding=how_it_decodes(base),
        at_work=at_work(base),
        fast=_fast() if is_ours(base) else {},
        parts=tuple(loaded.parts()),
        offloaded=loaded.offloaded(),
        adapters=loaded.adapters(),
        active=loaded.active(),
        problems=tuple(loaded.problems(quantization)),
    )


def _fast() -> dict[str, str]:
    fast = {patch.name for patch in load() if patch.kind.value == "fast"}
    states = {each.name: each.state.value for each in status() if each.name in fast}
    return {name: state for name, state in states.items() if state in ("applied", "optional")}


def _quantization(config: Any) -> str | None:
    if config is None:
        return None
    options = config if isinstance(config, dict) else config.to_dict()
    if options.get("load_in_4bit"):
        nested = ", double quantization" if options.get("bnb_4bit_use_double_quant") else ""
        return f"4-bit ({options.get('bnb_4bit_quant_type')}{nested})"
    if options.get("load_in_8bit"):
        return "8-bit"
    method = options.get("quant_method")
    return str(getattr(method, "value", method))


# -- what is printed ------------------------------------------------------------------------------


def _part_rows(found: ModelInspection) -> Iterator[tuple[str, ...]]:
    for part in found.parts:
        kinds = ", ".join(f"{number} {kind}" for kind, number in part.linear.items())
        first = (part.name, kinds, ", ".join(part.computes_on))
        for device in sorted(part.weights):
            yield (*first, device, size(part.weights[device]))
            first = ("", "", "")
    for device, number in found.bytes.items():
        yield "all", "", "", device, size(number)


def _messages(found: ModelInspection) -> Iterator[tuple[str, str]]:
    for problem in found.problems:
        patch = f" [{problem.patch}]" if problem.patch else ""
        # without PEFT's prefix
        names = [name.removeprefix("base_model.model.") for name in problem.modules]
        yield "problem", f"{problem.text}{patch}: {some(names, 3)}"
    for way, number in found.offloaded.items():
        text = f"accelerate's hooks onload the weights of {plural(number, 'module')} from {way}"
        yield "offload", f"{text} for each forward"
    for patch, text in found.at_work.items():
        yield "speed", f"{patch} {text}; GEMMA4_COMPAT_{patch.upper()}=0 turns it off"
    if "applied" in found.fast.values():
        yield "speed", f'{_FAST} are installed, for a GPU; uninstall("fast") turns them off'
    elif found.fast:
        yield "optional", f"{_FAST} are off; set GEMMA4_COMPAT_FAST=1 for a faster model on a GPU"
    if found.decoding is not None:
        yield "decoding", found.decoding
