"""The state of a ``Linear8bitLt``, in which a forward stores weight and scales for its backward."""

from __future__ import annotations

import copy
from typing import Any


def empty(module: Any) -> None:
    """Give the module a state of the same settings, without weight and scales.

    Autograd may still hold the old state, which stays complete.
    """
    module.state = copy.copy(module.state)
    module.state.CB = module.state.SCB = None
