"""Makes the inputs of decode steps as transformers does, with fewer operations.

``GenerationMixin.prepare_inputs_for_generation`` makes the masks of a static cache anew for each
token, in about twenty kernels, while the GPU waits.  In a step of one token, each of these masks
holds the last columns of the 2-D mask, or ones.  Each other input is an argument of the call, or
its last column.  The inputs that transformers made for a step of the same kind show which: what is
made here for that step is compared with them.
"""

from __future__ import annotations

from typing import Any

from .cache_memory import full_layers
from .conditions import kind_of

_UNCHANGED, _LAST = "unchanged", "last column"
#: How to make an input from the argument of the same name; for masks, their widths by name.
_Rule = str | dict[str, int]

_KINDS = 8  # per generation


class Inputs:
    """The inputs of the steps of one generation, learnt from those that transformers made."""

    def __init__(self) -> None:
        #: by the kind of a step; empty if transformers makes its inputs
        self.rules: dict[Any, dict[str, _Rule]] = {}

    def made(self, kind: Any, arguments: dict[str, Any], length: int) -> dict[str, Any] | None:
        """The inputs of a step of this kind; ``None`` if transformers makes them.

        ``length`` is the number of tokens, with that of the step.
        """
        rules = self.rules.get(kind)
        return (
            {n: _input(n, rule, arguments, length) for n, rule in rules.items()} if rules else None
        )

    def can_learn(self, kind: Any) -> bool:
        return kind is not None and kind not in self.rules and len(self.rules) < _KINDS

    def learn(self, kind: Any, inputs: Any, arguments: dict[str, Any], length: int) -> None:
        """Find the rules that make these inputs."""
        self.rules[kind] = {}
        rules = {name: _rule(value, arguments.get(name)) for name, value in inputs.items()}
        made = {n: _input(n, rule, arguments, length) for n, rule in rules.items()}
        if _equal(made, inputs):
            self.rules[kind] = rules


def kind_of_step(arguments: dict[str, Any], length: int, counting: list[Any]) -> Any:
    """What the inputs of a step depend on, besides the values of tensors.

    ``None`` if only transformers can make them.
    """
    import torch

    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if any(layer.cumulative_length_int != length - 1 for layer in counting):
        return None
    if mask is not None:
        is_2d = isinstance(mask, torch.Tensor) and mask.ndim == 2
        if not is_2d or mask.shape[1] != length or mask.device != ids.device:
            return None
    kinds = [(name, _kind_of_argument(value)) for name, value in arguments.items()]
    return full_layers(counting), *kinds


def _kind_of_argument(value: Any) -> Any:
    """The kind of an argument, of which a tensor may have any number of columns."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.shape[:-1], value.shape[-1:] == (1,), value.dtype, value.device
    return value if isinstance(value, (bool, int, type(None))) else id(value)


def _rule(value: Any, given: Any) -> _Rule:
    if value is not given and isinstance(value, dict):
        return {name: mask.shape[-1] for name, mask in value.items()}
    return _UNCHANGED if value is given else _LAST


def _input(name: str, rule: _Rule, arguments: dict[str, Any], length: int) -> Any:
    import torch

    given: Any = arguments.get(name)
    if isinstance(rule, str):
        if rule is _UNCHANGED:
            return given
        return given[..., -1:].clone(memory_format=torch.contiguous_format)
    ids, masks = arguments["input_ids"], {}
    for key, width in rule.items():
        shape = len(ids), 1, 1, width
        masks[key] = mask = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        seen = mask[..., :length]
        if given is None:
            seen.fill_(True)
        else:
            seen.copy_(given[:, None, None, -width:])
    return masks


def _equal(made: Any, value: Any) -> bool:
    import torch

    if made is value:
        return True
    if isinstance(value, dict):
        return made.keys() == value.keys() and all(_equal(made[n], value[n]) for n in value)
    if not isinstance(value, torch.Tensor):
        return False
    return bool(kind_of(made) == kind_of(value) and torch.equal(made, value))
