"""Captures the decode step of one token as a CUDA graph, and replays it for each token.

A ``Decoding`` belongs to one model.  Its ``ModelState``s describe the model (weights, adapters,
settings) at the time of a capture.  Its ``Memory``s hold the tensors of static caches, and the
``Step``s (the graphs) that write to them.  It is one file, because a step passes through all of it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...model.caches import cache_name
from ...objects import NotCopied, attached
from ..host.blocks import first_layers, in_capture
from ..host.forward_lock import lock_of
from ..kernels.watch import is_of_user, uses_of, watched
from ..memory import is_short_of_memory
from .cache_memory import Layers, Memory, can_count_holders, full_layers, layers_of
from .conditions import (
    INPUTS,
    check_process,
    environment_now,
    hooks_so_far,
    kind_of,
    modules_of_a_step,
    unknown_input,
)
from .graph import (
    CaptureFailed,
    Launch,
    NotCaptured,
    Step,
    flattened,
    no_garbage_collection,
    reason_of,
)
from .held import Held
from .inputs import Inputs, kind_of_step
from .state import ModelState

logger = logging.getLogger(__name__)

_STATES = 3  # per model: enough for two adapters that take turns, and no adapter
_MEMORIES = 4  # per model
_FREE = 2  # of them, free ones
_STEPS = 8  # per memory
_KINDS = 64  # per state
_NEW_KINDS = 3  # per call
_CHANGES = 3  # of the model, per call
_WATCHED = 3  # eager steps, for what runs only once: a warning, an import


def decoding_of(model: Any) -> Decoding:
    """The ``Decoding`` of a model, created at the first call."""
    return attached(model, "_decoding", Decoding)  # type: ignore[no-any-return]


def decoder_of(model: Any, cache: Any) -> Decoder | None:
    """The ``Decoder`` that decodes with this cache; ``None`` if there is none."""
    decoding = getattr(model, "__dict__", {}).get("_decoding")
    decoder = None if decoding is None else decoding.decoders.get(id(cache))
    if decoder is None or decoder.memory is None or decoder.memory.used_by() is not cache:
        return None
    return decoder  # type: ignore[no-any-return]


def seen_obstacle(model: Any) -> str | None:
    """Why earlier steps of a model stayed eager, if nothing has changed since."""
    decoding: Decoding | None = vars(model).get("_decoding")
    failed = () if decoding is None else [each for each in decoding.states if each.obstacle]
    same = (each for each in failed if each.snapshot.change(with_settings=False) is None)
    return next((each.obstacle for each in same), None)


def warn_once(captured: str, model: Any, why: str) -> None:
    """Warn once per model and reason; ``captured`` names what is not captured."""
    warned = decoding_of(model).warned
    if why not in warned:
        warned.add(why)
        logger.warning(
            "%s decodes eagerly with a static cache.  Its %s are not captured as CUDA graphs, "
            "because %s.",
            type(model).__name__,
            captured,
            why,
        )


def forget() -> None:
    """Free the graphs of all models."""
    for decoding in list(_all):
        decoding.forget()


class Decoding(NotCopied):
    """The captured decode steps of one model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.states: list[ModelState] = []
        self.memories: list[Memory] = []
        self.warned: set[str] = set()  # the reasons of past warnings
        #: by the id of the cache
        self.decoders: weakref.WeakValueDictionary[int, Decoder] = weakref.WeakValueDictionary()
        _all.add(self)

    def forget(self) -> None:
        with self.lock:
            self.states, self.memories = [], []

    def state(self, model: Any, drafter: Any = None) -> ModelState:
        """The state that describes the model as it is now, and its drafter."""
        check_process()
        environment, hooks = environment_now(), hooks_so_far()
        with self.lock:
            for state in self.states:
                if state.drafter() is not drafter:
                    continue
                change = state.change(environment)
                if change is None:
                    self.states.remove(state)
                    state.hooks = hooks
                    break
                logger.debug("captured decode steps are not used, because %s changed", change)
            else:
                state = ModelState(model, environment, drafter)
            self.states = [state, *self.states][:_STATES]
            for memory in self.memories:
                memory.steps = {k: v for k, v in memory.steps.items() if k[0] in self.states}
            return state

    def memory_of(self, cache: Any) -> Memory:
        """The ``Memory`` of a cache; a new one if it has none yet."""
        with self.lock:
            found = next((memory for memory in self.memories if memory.is_in(cache)), None)
            memory = Memory(cache) if found is None else found
            if can_count_holders(memory.device):  # else no later cache may use it
                free = [each for each in self.memories if each is not found and each.is_free()]
                dropped = [memory, *free[: len(free) - _FREE + 1]]
                others = [each for each in self.memories if each not in dropped]
                self.memories = [*others, memory][-_MEMORIES:]
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


@dataclass(frozen=True)
class Forward:
    """What a step runs, which gets the inputs and the cache.

    Args:
        function: the model, or a function.
        inputs: the names of the inputs that it reads.
        in_place: whether the caller tells the cache which rows to write, and counts its tokens.
        has_layers: whether it runs the decoder's layers, which may be offloaded.
        usual: runs the same as transformers does, with the user's code.  It runs once before, to
            see whether there is such code, and wherever a step is not captured.
        agrees: whether outputs are right, given those of ``usual`` and those of it with another
            kernel for attention.  It is asked once.
        optional: whether the step is only replayed, and returns ``None`` if that is not possible.
    """

    function: Callable[..., Any]
    inputs: Collection[str] = INPUTS
    in_place: bool = False
    has_layers: bool = True
    usual: Callable[[], Any] | None = None
    agrees: Callable[[Any, Any, Any], bool] | None = None
    optional: bool = False


class Decoder:
    """Stands in for the model during one call of ``generate``.

    Captures and replays steps of one token; passes every other call on to the model, and all calls
    after an error that is not the model's.
    """

    def __init__(
        self, model: Any, warn: Any, drafter: Any = None, only_transformers: bool = False
    ) -> None:
        self.model, self.warn, self.drafter = model, warn, drafter
        self.only_transformers = only_transformers  # whether no other code runs between two steps
        self.decoding = decoding_of(model)
        self.state: ModelState | None = None
        self.held: Held | None = None  # all of the state, if other code runs between two steps
        self.changes = 0  # of the model during this call
        self.memory: Memory | None = None
        self.layers: Layers | None = None
        self.inputs = Inputs()
        self.steps: set[Step] = set()  # that may run, while another thread's call drops them
        self.kinds: set[Any] = set()  # the kinds of steps that were not captured before this call
        self.watched = 0  # eager steps that ran functions that a graph cannot stand for
        self.obstacle: str | None = None
        self.replayed = False  # whether the last step was
        self.is_known = False  # whether no code of the user made the last step's inputs

    def __call__(self, **inputs: Any) -> Any:
        ids = inputs.get("input_ids")
        self.replayed = False
        if ids is None or ids.shape[-1] != 1:
            return self.model(**inputs)
        return self.run(Forward(self.model), inputs)

    def run(self, forward: Forward, inputs: dict[str, Any]) -> Any:
        """Run a step: captured, or eagerly if that is not possible."""
        launch = Launch()
        with ExitStack() as stack:
            if self.obstacle is None:
                try:
                    output = self._replayed(forward, inputs, stack, launch)
                except Exception as error:
                    if launch.comes_before(error):
                        raise
                    if not (forward.optional and is_short_of_memory(error)):
                        self.give_up(error)
                else:
                    if output is not None:
                        return output()
            if forward.optional:
                return None
            return forward.function(**inputs) if forward.usual is None else forward.usual()

    def prepared(self, make: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """What ``make`` returns: the inputs of the next step, made from these arguments."""
        kind = inputs = None
        layers, counting = self.layers, []
        if self.obstacle is None and layers is not None:
            counting = layers.counting if layers.are_of(arguments[cache_name()]) else []
        length = counting[0].cumulative_length_int + 1 if counting else 0
        with harmless("the inputs of a step are not made here"):
            if counting:
                kind = kind_of_step(arguments, length, counting)
                inputs = self.inputs.made(kind, arguments, length)
        self.is_known = inputs is not None
        if inputs is not None:
            return inputs
        if not self.inputs.can_learn(kind):
            return make()
        with watched() as watch:
            inputs = make()
        with harmless("the inputs of a step are not made here"):
            self.is_known = watch.unknown() is None
            if self.is_known:  # a user's function may make other masks next time
                self.inputs.learn(kind, inputs, arguments, length)
        return inputs

    def give_up(self, error: Exception) -> None:
        """Run the other steps of this call eagerly.

        Those of later calls, too, after a capture that failed for another reason than memory.
        """
        if is_of_user(error):
            raise error
        logger.debug("a step is not captured", exc_info=error)
        self.obstacle = reason_of(error)
        lasts = isinstance(error, CaptureFailed) and type(error.__cause__) is not NotCaptured
        if lasts and self.state is not None and not is_short_of_memory(error):
            self.state.obstacle = self.obstacle
        self.warn(self.obstacle)

    def _replayed(
        self, forward: Forward, inputs: dict[str, Any], stack: ExitStack, launch: Launch
    ) -> Callable[[], Any] | None:
        """Run a step; return a function that makes its output.

        It runs in the contexts of ``stack``.  Return ``None`` if the step is to run as usual.
        """
        import torch

        cache = inputs.get(cache_name())
        layers = self.layers
        if layers is None or not (self.only_transformers and layers.are_of(cache)):
            layers = self.layers = Layers(cache)
        if (
            torch.is_grad_enabled()
            or not layers.static
            or not all(layer.is_initialized for layer in layers.static)
        ):
            return None
        if not layers.are_usual:
            raise NotCaptured("its cache has functions or layers of another library")
        state = self._state_now()
        why = state.obstacle or (None if forward.in_place else unknown_input(inputs))
        if why is not None:
            raise NotCaptured(why)
        own = {k: v for k, v in inputs.items() if k in forward.inputs and v is not cache}
        names, leaves = flattened(own)
        full = None if forward.in_place else full_layers(layers.counting)
        kind = (full, names, *map(kind_of, leaves))
        memory = self.memory
        if memory is None or not memory.is_in(cache, layers.static):
            memory = self.memory = self.decoding.memory_of(cache)
            if not forward.in_place:
                self.decoding.decoders[id(cache)] = self
        step = memory.steps.get((state, kind))
        if step is None and forward.optional:
            return None
        if step is None:
            self.kinds.add(kind)
            if len(self.kinds) > _NEW_KINDS:
                raise NotCaptured("its steps have inputs of ever new kinds")
            if forward.usual is not None and (kind, "usual") not in state.warm:
                return lambda: self._as_usual(forward, inputs, state, (kind, "usual"))
            if kind not in state.warm:
                stack.enter_context(self._eager(state, kind))
                return lambda: forward.function(**inputs)
            step = self._captured(forward, state, cache, memory, leaves, names)
            _put(memory.steps, (state, kind), step, _STEPS)
        self.steps.add(step)
        output = step.replay(cache, leaves, launch, tokens=0 if forward.in_place else 1)
        self.replayed = True
        return output

    def _state_now(self) -> ModelState:
        """The state of the model.

        Raises:
            NotCaptured: code that runs between two steps changes the model again and again.
        """
        old = self.state
        if old is not None and old.lasts(self.held, self.only_transformers):
            return old
        self.state = state = self.decoding.state(self.model, self.drafter)
        self.held = None if self.only_transformers else Held(state.snapshot)
        self.changes += old is not None and old is not state
        if self.changes > _CHANGES:
            raise NotCaptured("the model is changed between its steps again and again")
        return state

    def _as_usual(
        self, forward: Forward, inputs: dict[str, Any], state: ModelState, kind: Any
    ) -> Any:
        """Run a step as transformers does; without code of the user, run it again as captured."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        assert forward.usual is not None
        with self._eager(state, kind):
            output = forward.usual()
        if kind not in state.warm:
            return output
        if forward.agrees is None:
            return self.run(replace(forward, usual=None), inputs)
        with sdpa_kernel(SDPBackend.MATH):
            other = forward.usual()
        own = self.run(replace(forward, usual=None), inputs)
        if forward.agrees(own, output, other):
            return own
        self.give_up(CaptureFailed("its outputs are not those of transformers"))
        return forward.usual()

    @contextmanager
    def _eager(self, state: ModelState, kind: Any) -> Iterator[None]:
        """The context of the eager step before a capture, which compiles kernels."""
        turn = lock_of(self.model, weights=False)  # the hooks of users may wait for threads
        with turn, no_garbage_collection(), watched() as watch:
            yield
        try:
            state.snapshot.add(uses_of(watch.functions.values()))
            self.held = None  # it lacks these functions
            why = watch.unknown()
        except Exception as error:  # the step itself has run
            return self.give_up(error)
        if why is None:
            _put(state.warm, kind, True, _KINDS)
            return
        self.watched += 1
        if self.watched >= _WATCHED:
            self.give_up((CaptureFailed if watch.is_complete else NotCaptured)(why))

    def _captured(
        self,
        forward: Forward,
        state: ModelState,
        cache: Any,
        memory: Memory,
        leaves: Any,
        names: Any,
    ) -> Step:
        modules = modules_of_a_step(self.model).values() if forward.has_layers else ()

        def captured() -> Step:
            with in_capture(first_layers(modules)) as send_ahead:

                def function(**kwargs: Any) -> Any:
                    send_ahead()
                    with watched(state.snapshot.is_changed) as watch:
                        output = forward.function(**kwargs)
                    if watch.is_wrong or watch.unknown() or state.snapshot.change() is not None:
                        raise NotCaptured("other code changed the model during a capture")
                    return output

                return Step(function, state.device, cache, memory, leaves, names)

        with lock_of(self.model):  # another thread must not send layers meanwhile
            try:
                return captured()
            except CaptureFailed as error:
                if not is_short_of_memory(error):
                    raise
            # With an empty memory cache.  In the handler, the error would hold tensors.
            return captured()


@contextmanager
def harmless(consequence: str, warn: Callable[[str], Any] | None = None) -> Iterator[None]:
    """In this context, an error is logged with what it means, unless it is one of the user.

    ``warn`` gets the reason.
    """
    try:
        yield
    except Exception as error:
        if is_of_user(error):
            raise
        logger.debug(consequence, exc_info=True)
        if warn is not None:
            warn(reason_of(error))


def _put(entries: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add an entry; drop the oldest ones beyond ``most``."""
    entries[key] = value
    for old in list(entries)[:-most]:
        del entries[old]
