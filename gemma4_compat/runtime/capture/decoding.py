"""Captures the decode step of one token as a CUDA graph, and replays it for each token.

A ``Decoding`` belongs to one model.  Its ``Version``s describe the model (weights, adapters,
settings) at the time of a capture.  Its ``Memory``s hold the tensors of static caches, and the
``Step``s (the graphs) that write to them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from ...objects import NotCopied, attached
from ..host.blocks import captured, first_layers
from ..host.forward_lock import lock_of
from ..kernels.int8_outliers import has_threshold, outliers_on_the_gpu
from ..kernels.rms_norm import norms_in_one_kernel
from .branches import side_by_side
from .cache_memory import Memory, full_layers, layers_of
from .conditions import (
    INPUTS,
    SEARCH,
    device_or_obstacle,
    environment_now,
    kind_of,
    modules_of_a_step,
    unknown_input,
)
from .graph import CaptureFailed, NotCaptured, Step
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

_VERSIONS = 3  # per model: enough for two adapters that take turns, and no adapter
_MEMORIES = 2  # free ones, per model


def decoding_of(model: Any) -> Decoding:
    """The ``Decoding`` of a model, created at the first call."""
    return attached(model, "_decoding", Decoding)  # type: ignore[no-any-return]


def forget() -> None:
    """Free the graphs of all models."""
    for decoding in list(_all):
        decoding.forget()


class Decoding(NotCopied):
    """The captured decode steps of one model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.versions: list[Version] = []
        self.memories: list[Memory] = []
        self.warned: set[str] = set()  # the reasons of past warnings
        _all.add(self)

    def forget(self) -> None:
        with self.lock:
            self.versions, self.memories = [], []

    def version(self, model: Any) -> Version:
        """The version that describes the model as it is now."""
        environment = environment_now()
        with self.lock:
            for version in self.versions:
                change = version.change(environment)
                if change is None:
                    self.versions.remove(version)
                    break
                logger.debug("captured decode steps are not used, because %s changed", change)
            else:
                version = Version(model, environment)
            self.versions = [version, *self.versions][:_VERSIONS]
            for memory in self.memories:
                memory.steps = {k: v for k, v in memory.steps.items() if k[0] in self.versions}
            return version

    def memory_of(self, cache: Any) -> Memory:
        """The ``Memory`` of a cache; a new one if it has none yet."""
        with self.lock:
            for memory in self.memories:
                if memory.used_by() is cache and memory.is_in(cache):
                    return memory
            free = [memory for memory in self.memories if memory.is_free()]
            for memory in free[: len(free) - _MEMORIES + 1]:
                self.memories.remove(memory)
            memory = Memory(cache)
            self.memories.append(memory)
            return memory

    def lend(self, cache: Any, batch_size: int) -> None:
        """Lend a new cache free memory of the same size.

        Without such memory, drop all that is free, because a longer cache may need the space.
        """
        with self.lock:
            free = [memory for memory in self.memories if memory.is_free()]
            if not free or any(layer.is_initialized for layer in layers_of(cache)):
                return
            fitting = [memory for memory in free if memory.fits(cache, batch_size)]
            if fitting:
                fitting[-1].lend_to(cache)
            else:
                for memory in free:
                    self.memories.remove(memory)


_all: weakref.WeakSet[Decoding] = weakref.WeakSet()


class Version:
    """The state of a model at the time of a capture."""

    def __init__(self, model: Any, environment: Any) -> None:
        self.environment = environment
        modules = modules_of_a_step(model)
        config = model.config
        configs = [config, config.get_text_config(decoder=True)]
        self.snapshot = Snapshot(modules.values(), configs)
        self.warm: set[Any] = set()  # the kinds of steps that ran eagerly before
        self.device, self.obstacle = device_or_obstacle(model, modules)

    def change(self, environment: Any) -> str | None:
        """What changed since, for a log message; ``None`` if nothing changed."""
        if environment != self.environment:
            return "a setting of PyTorch"
        return self.snapshot.change()


class Decoder:
    """Stands in for the model during one call of ``generate``.

    Captures and replays steps of one token; passes every other call on to the model.
    """

    def __init__(self, model: Any, warn: Any) -> None:
        self.model, self.warn = model, warn
        self.decoding = decoding_of(model)
        self.version: Version | None = None
        self.obstacle: str | None = None

    def __call__(self, **inputs: Any) -> Any:
        import torch

        cache, ids = inputs.get("past_key_values"), inputs.get("input_ids")
        layers = layers_of(cache)
        if (
            ids is None
            or ids.shape[-1] != 1
            or torch.is_grad_enabled()
            or not layers
            or not all(layer.is_initialized for layer in layers)
        ):
            return self.model(**inputs)
        if self.obstacle is None:
            prepared = self._prepared(cache, inputs)
        if self.obstacle is None:
            try:
                return self._step(cache, inputs, *prepared)
            except NotCaptured as why:
                self.obstacle = str(why)
                if isinstance(why, CaptureFailed) and self.version is not None:
                    self.version.obstacle = self.obstacle
        self.warn(self.obstacle)
        return self.model(**inputs)

    def _prepared(self, cache: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """The version, memory and kind of a step; sets ``obstacle`` if it is not to be captured.

        An error in this code must not end a generation that is possible without it.
        """
        from torch.utils._pytree import tree_flatten

        try:
            if self.version is None:
                self.version = self.decoding.version(self.model)
            self.obstacle = self.version.obstacle or unknown_input(inputs)
            if self.obstacle is not None:
                return ()
            own = {k: v for k, v in inputs.items() if k in INPUTS and v is not cache}
            leaves, spec = tree_flatten(own)
            kind = (full_layers(cache), spec, *(kind_of(leaf) for leaf in leaves))
            return self.version, self.decoding.memory_of(cache), kind, leaves, spec
        except Exception as error:
            self.obstacle = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.debug("a step is not captured", exc_info=True)
            return ()

    def _step(
        self, cache: Any, inputs: Any, version: Version, memory: Memory, kind: Any, leaves: Any,
        spec: Any,
    ) -> Any:  # fmt: skip
        step = memory.steps.get((version, kind))
        if step is None:
            modules = modules_of_a_step(self.model).values()
            if len(inputs["input_ids"]) > 1 and any(map(has_threshold, modules)):
                raise NotCaptured(SEARCH.format("the inputs of several sequences"))
            if kind not in version.warm:
                version.warm.add(kind)
                with lock_of(self.model), outliers_on_the_gpu(), norms_in_one_kernel(modules):
                    return self.model(**inputs)
            first = first_layers(modules)
            # Another thread must not send layers meanwhile.
            with lock_of(self.model), captured(first) as send_ahead, norms_in_one_kernel(modules):

                def model(**kwargs: Any) -> Any:
                    send_ahead()
                    with side_by_side(modules, version.device), outliers_on_the_gpu():
                        return self.model(**kwargs)

                step = Step(model, version.device, cache, memory, leaves, spec)
            memory.steps[version, kind] = step
        return step.replay(cache, leaves)
