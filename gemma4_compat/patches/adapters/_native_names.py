"""The replacement of transformers' own ``load_adapter``, and weight renamings for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from ...objects import shadowed
from .._text_model import with_renaming

LOAD_ADAPTER = ("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")


def loading_in(block: Callable[[Any, str], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """A function around ``LOAD_ADAPTER`` that runs it in ``block(model, adapter_name)``."""

    def load_adapter(
        original: Any,
        self: Any,
        peft_model_id: Any = None,
        adapter_name: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with block(self, adapter_name or "default"):
            return original(self, peft_model_id, adapter_name, *args, **kwargs)

    return load_adapter


@contextmanager
def loading_with(model: Any, renamings: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Let ``model.load_adapter`` use additional ``WeightRenaming`` objects.

    ``renamings`` is called when the adapter's modules are in the model.
    """
    load = model._load_pretrained_model

    @wraps(load)
    def load_pretrained_model(*args: Any, load_config: Any, **kwargs: Any) -> Any:
        return load(*args, load_config=with_renaming(load_config, *renamings()), **kwargs)

    with shadowed(model, _load_pretrained_model=load_pretrained_model):
        yield
