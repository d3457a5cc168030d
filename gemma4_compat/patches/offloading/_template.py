# The template of a patch, which `nox -s new` copies without these lines.  A file whose name begins
# with "_" is not a patch: this one is never applied and not in the wheel.  Its bug is real.
"""Iterating over accelerate's ``PrefixedDataset`` yields keys that it does not have.

accelerate gives the hook of each module a ``PrefixedDataset``: the weights of the whole model, seen
from that module.  A lookup puts the module's name in front of the key.  Iterating does not remove
the name again, so ``items()`` and ``dict()`` add it twice.  ``len()`` also counts the weights of
all other modules.

The fix removes the prefix, and counts only the keys that iterating yields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="patch_name",
    # The text of the exception, or what users see if no exception is raised.
    symptom="KeyError: 'layer.layer.weight' from dict(PrefixedDataset(weights, 'layer.'))",
    # Requirements that must all hold, as measured.  ">=" gives the first release that has the bug;
    # omit it if every supported release has the bug.  "<" gives the first release without it.
    affects=("accelerate",),
    # Or links=(...,), the upstream issues and pull requests.
    unreported="No supported library iterates over this mapping.",
)

_OFFLOAD = "accelerate.utils.offload"


@PATCH.probe
def keys_keep_their_prefix() -> Finding:
    """Test the installed code.  A probe may import only the modules that are patched."""
    from accelerate.utils.offload import PrefixedDataset

    keys = list(PrefixedDataset({"layer.weight": None}, "layer."))
    if keys == ["weight"]:
        return fixed("iterating removes the prefix")
    if keys == ["layer.weight"]:
        return broken()
    return drifted(f"iterating yields {keys}")


@PATCH.around(_OFFLOAD, "PrefixedDataset.__iter__")
def iterate(original: Any, self: Any) -> Iterator[str]:
    return (key.removeprefix(self.prefix) for key in original(self))


@PATCH.around(_OFFLOAD, "PrefixedDataset.__len__")
def length(original: Any, self: Any) -> int:
    return sum(1 for _ in self)
