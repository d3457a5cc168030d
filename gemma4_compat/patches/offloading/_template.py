# The template of a patch, which `nox -s new` copies without these lines.  A file whose name begins
# with "_" is not a patch: this one is never applied and not in the wheel.  Its bug is real.
"""Iterating over a view of the offloaded weights yields keys that the view does not have.

accelerate gives the hook of each module a ``PrefixedDataset``: the whole model's weights, seen from
that module.  Looking up a key puts the module's name in front of it.  Iterating does not take it
off again, so that ``items()`` and ``dict()`` put it there twice; and the length counts the weights
of all other modules, too.

The fix takes the prefix off, and counts what is iterated over.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="patch_name",
    # The users' words: the text of the exception, or what they see where there is none.
    symptom="KeyError: 'layer.layer.weight' from dict(PrefixedDataset(weights, 'layer.'))",
    # Requirements that must all hold.  As measured: the first release that has the bug (">="),
    # unless all that we support have it, and the first that does not, if there is one ("<").
    affects=("accelerate",),
    changes="PrefixedDataset yields the keys that it can be asked for, and counts those alone.",
    # Or links=(...,), the upstream issues and pull requests.
    unreported="Nobody iterates over this mapping here.",
)

_OFFLOAD = "accelerate.utils.offload"


@PATCH.probe
def keys_keep_their_prefix() -> Finding:
    """Ask the installed code.  It may import nothing but the modules that are patched."""
    from accelerate.utils.offload import PrefixedDataset

    keys = list(PrefixedDataset({"layer.weight": None}, "layer."))
    if keys == ["weight"]:
        return fixed("iterating takes the prefix off")
    if keys == ["layer.weight"]:
        return broken()
    return drifted(f"iterating yields {keys}")


@PATCH.replaces(_OFFLOAD, "PrefixedDataset.__iter__")
def iterate(original: Any) -> Any:
    # A method, where there is a choice: a "from x import function" elsewhere keeps the original.
    @wraps(original)
    def without_prefix(self: Any) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in original(self))

    return without_prefix


@PATCH.replaces(_OFFLOAD, "PrefixedDataset.__len__")
def length(original: Any) -> Any:
    @wraps(original)
    def of_this_module(self: Any) -> int:
        return sum(1 for _ in self)

    return of_this_module
