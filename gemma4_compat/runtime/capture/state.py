"""The state of a model at the time of a capture; its graphs are right until something changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .conditions import device_or_obstacle, hooks_so_far, modules_of_a_step
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

    def lasts(self) -> bool:
        """Whether no hook was added since, and no adapter switched, between two tokens."""
        return self.hooks == hooks_so_far() and self.snapshot.has_same_adapter()
