"""The state of a ``Linear8bitLt``, in which a forward stores weight and scales for its backward."""

from __future__ import annotations

import copy
from typing import Any


def clear_state(module: Any) -> None:
    """Remove weight and scales from the state of a module.

    With gradients enabled, autograd may hold the state, so the module gets a new one.
    """
    import torch

    if torch.is_grad_enabled():
        module.state = copy.copy(module.state)
    module.state.CB = module.state.SCB = None
