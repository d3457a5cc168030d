"""Additional weight renamings for transformers' own ``load_adapter``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ._shadow import shadowed


@contextmanager
def loading_with(model: Any, renamings: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Let ``model.load_adapter`` use additional ``WeightRenaming`` objects.

    ``renamings`` is called when the adapter's modules are in the model.
    """
    load = model._load_pretrained_model

    @wraps(load)
    def load_pretrained_model(*args: Any, load_config: Any, **kwargs: Any) -> Any:
        mapping = [*(load_config.weight_mapping or ()), *renamings()]
        load_config = dataclasses.replace(load_config, weight_mapping=mapping)
        return load(*args, load_config=load_config, **kwargs)

    with shadowed(model, _load_pretrained_model=load_pretrained_model):
        yield
