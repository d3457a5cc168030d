"""The tensors of a module, and where their values are."""

from __future__ import annotations

from typing import Any


def address(tensor: Any) -> int | None:
    """The address of a tensor's values; ``None`` if it has no storage, as sparse tensors have."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return None


def own_tensors(module: Any) -> list[Any]:
    """The parameters and buffers of a module, without those of its submodules."""
    return present(module._parameters) + present(module._buffers)


def present(entries: Any) -> list[Any]:
    """The values of a dictionary that are not ``None``."""
    return [value for value in entries.values() if value is not None]
