"""The quant states of offloaded 4-bit weights."""

from __future__ import annotations

from typing import Any

#: On the quant state of a weight on meta, and on the execution state made from it: the host state.
HOST = "_offload_host_state"


def is_of_offloaded(state: Any) -> bool:
    """Whether a quant state is that of an offloaded weight, or of its copy for a forward."""
    return HOST in vars(state)
