"""The quant states of 4-bit weights."""

from __future__ import annotations

import copy
from typing import Any

#: On the quant state of a weight on meta, and on the execution state made from it: the host state.
HOST = "_offload_host_state"


def is_of_offloaded(state: Any) -> bool:
    """Whether a quant state is that of an offloaded weight, or of its copy for a forward."""
    return HOST in vars(state)


def tensors_of(quant_state: Any) -> dict[str, Any]:
    """The tensors of a quant state, by name."""
    tensors = {"absmax": quant_state.absmax, "code": quant_state.code}
    if quant_state.nested:
        tensors["offset"] = quant_state.offset
        tensors["state2.absmax"] = quant_state.state2.absmax
        tensors["state2.code"] = quant_state.state2.code
    return tensors


def with_tensors(quant_state: Any, tensors: dict[str, Any]) -> Any:
    """A copy of a quant state, with these tensors instead."""
    state = copy.copy(quant_state)
    if state.nested:
        state.state2 = copy.copy(state.state2)
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        setattr(state.state2 if path else state, attribute, tensor)
    return state
