"""The state of a model at the time of a capture; its graphs are right until something changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .conditions import (
    check_process,
    device_or_obstacle,
    environment_now,
    hooks_so_far,
    modules_of_a_step,
)
from .held import Held
from .snapshot import Snapshot


class ModelState:
    """The state of a model, and of its drafter, at the time of a capture."""

    def __init__(self, model: Any, environment: Any, drafter: Any = None) -> None:
        self.environment = environment
        self.hooks = hooks_so_far()
        modules = modules_of_a_step(model)
        configs = [model.config, model.config.get_text_config(decoder=True)]
        self.drafter: Callable[[], Any] = lambda: None
        if drafter is not None:
            self.drafter = weakref.ref(drafter)
            named = modules_of_a_step(drafter).items()
            modules |= {f"the drafter's {name}": module for name, module in named}
            configs += [drafter.config, drafter.config.get_text_config(decoder=True)]
        self.snapshot = Snapshot(modules.values(), configs)
        self.warm: dict[Any, bool] = {}  # the kinds of steps that ran eagerly before
        self.device, self.obstacle = device_or_obstacle(model, modules)

    def change(self, environment: Any) -> str | None:
        """What changed since, for a log message; ``None`` if nothing changed."""
        if environment != self.environment:
            return "a setting of PyTorch"
        return self.snapshot.change()

    def lasts(self, held: Held | None, only_transformers: bool) -> bool:
        """Whether nothing has changed since the last token.

        If only functions of transformers run between two tokens, only another thread can change
        the model; a hook that it adds is noticed, and an adapter that it switches or merges.

        Raises:
            NotCaptured: there are modes of PyTorch now, or forward hooks for all modules.
        """
        if self.hooks != hooks_so_far():
            return False
        if only_transformers:
            return self.snapshot.has_same_adapter()
        check_process()
        return held is not None and self.environment == environment_now() and held.is_same()
