"""Captures a decode step as a CUDA graph and replays it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...model.caches import cache_name
from ..host.forward_lock import held
from ..kernels.watch import is_of_user
from ..memory import is_short_of_memory
from .cache_memory import Memory, counting_layers

_captures: dict[Any, Any] = {}  # locks, by device
_replays: dict[Any, Any] = {}
_PATIENCE = 5.0  # seconds
_last_stream: dict[Any, Any] = {}  # device -> stream of the latest replay
_streams: dict[tuple[str, Any], Any] = {}  # by use and device
_short: set[Any] = set()  # devices whose memory was short in the latest capture
_pausing = threading.Lock()
_pauses: dict[object, int] = {}  # of the garbage collector: its threshold before the first


class NotCaptured(Exception):
    """A step cannot be captured; the message is the reason, for the user."""


class CaptureFailed(NotCaptured):
    """A capture was tried and failed; do not capture other steps of this model."""


def reason_of(error: Exception) -> str:
    """An error as a reason for the user, in one line."""
    if isinstance(error, NotCaptured):
        return str(error)
    why = str(error).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {why}"


@contextmanager
def _turn(locks: dict[Any, Any], device: Any) -> Iterator[None]:
    """A block of one thread at a time.  A signal's handler in it may wait for other threads."""
    with held(locks.setdefault(device, threading.RLock()), iter([_PATIENCE])) as has_turn:
        if not has_turn:
            raise NotCaptured(f"another thread has used captured steps for {_PATIENCE:.0f} s")
        yield


def flattened(inputs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """The leaves of the inputs of a step and their names; masks may be in a dict."""
    leaves: dict[Any, Any] = {}
    for name, value in inputs.items():
        nested = isinstance(value, dict) and value
        leaves |= {(name, key): leaf for key, leaf in value.items()} if nested else {name: value}
    return tuple(leaves), [*leaves.values()]


def unflattened(names: tuple[Any, ...], leaves: list[Any]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(name, tuple):
            inputs.setdefault(name[0], {})[name[1]] = leaf
        else:
            inputs[name] = leaf
    return inputs


class Launch:
    """How far the launch of a step has come: it must not run again after that."""

    def __init__(self) -> None:
        self.has_begun = self.is_done = False

    def comes_before(self, error: Exception) -> bool:
        """Whether the step runs in spite of this error, such as one that another thread sends."""
        is_of_launch = isinstance(error, RuntimeError) and error.args
        return self.is_done or (self.has_begun and not is_of_launch)


class Step:
    """One decode step as a CUDA graph, with the tensors that it reads and writes."""

    def __init__(
        self, model: Any, device: Any, cache: Any, memory: Memory, leaves: list[Any], names: Any
    ) -> None:
        import torch

        if any(isinstance(leaf, torch.Tensor) and leaf.device != device for leaf in leaves):
            raise NotCaptured(f"its inputs are not on {device}, where the model computes")
        self.device = device
        with torch.inference_mode(mode=False):
            inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self.inputs = [x for x in inputs if isinstance(x, torch.Tensor)]
        kwargs = unflattened(names, inputs)
        if not memory.steps:  # PyTorch frees a pool with the last of its graphs
            memory.pool = torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()
        with _counters_kept(cache):
            output = _captured(self.graph, memory.pool, device, model, kwargs, cache)
        self.kind = type(output)
        self.output: dict[str, Any] = {}
        for name, value in output.items():
            if value is not cache and not isinstance(value, torch.Tensor):
                raise CaptureFailed(f"its output {name} is not a tensor")
            self.output[name] = None if value is cache else value

    def replay(
        self, cache: Any, leaves: list[Any], launch: Launch, tokens: int = 1
    ) -> Callable[[], Any]:
        """Run the step with these inputs; return a function that makes a copy of its output.

        ``tokens`` are counted as added to the cache.  All that can fail comes before the launch.
        """
        import torch

        new_inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        copies = {k: v if v is None else torch.empty_like(v) for k, v in self.output.items()}
        with _turn(_replays, self.device), torch.cuda.device(self.device):
            # Steps share a cuBLAS workspace, so they must run one after the other.
            stream = torch.cuda.current_stream()
            last = _last_stream.get(self.device, stream)
            if last != stream:
                stream.wait_stream(last)
            _last_stream[self.device] = stream
            for own, new in zip(self.inputs, new_inputs, strict=True):
                own.copy_(new, non_blocking=True)
            launch.has_begun = True
            self.graph.replay()
            launch.is_done = True
            _copy(self.output, copies)
        for layer in counting_layers(cache):
            layer.cumulative_length_int += tokens
        # The GPU works meanwhile.
        return lambda: self.kind(**{k: cache if v is None else v for k, v in copies.items()})


def _copy(tensors: dict[str, Any], copies: dict[str, Any]) -> None:
    """Copy on the device, which needs no memory."""
    for name, copy in copies.items():
        if copy is not None:
            copy.copy_(tensors[name])


def _captured(graph: Any, pool: Any, device: Any, model: Any, inputs: Any, cache: Any) -> Any:
    """Record the kernels of a call in ``graph`` without running them, and return its output.

    ``torch.cuda.graph`` would collect garbage and empty PyTorch's memory cache at each capture.
    """
    import torch

    with _turn(_captures, device), torch.cuda.device(device), no_garbage_collection():
        if device in _short:  # a capture cannot use the memory that PyTorch's cache holds
            _short.discard(device)
            torch.cuda.empty_cache()
        stream = stream_for("captures", device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _random_numbers_kept(device):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                output = model(**inputs, **{cache_name(): cache})
                graph.capture_end()
            except BaseException as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                if is_short_of_memory(error):
                    _short.add(device)
                if isinstance(error, Exception) and not is_of_user(error):
                    raise CaptureFailed(reason_of(error)) from error
                raise
        return output


def stream_for(use: str, device: Any) -> Any:
    """One stream for all captures, because cuBLAS keeps 32 MiB for each stream; one for drafts."""
    import torch

    own = _streams.get((use, device))
    return own or _streams.setdefault((use, device), torch.cuda.Stream(device))


@contextmanager
def _random_numbers_kept(device: Any) -> Iterator[None]:
    """Restore PyTorch's generator after a failed capture, which leaves it in capture mode."""
    import torch

    state = torch.cuda.get_rng_state(device)
    try:
        yield
    except BaseException:
        fresh = torch.Generator(device)
        fresh.set_state(state)
        own = torch.cuda.default_generators[device.index]
        own.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stop the garbage collector, which may free GPU memory; a capture does not allow that."""
    pause = object()
    try:
        with _pausing:
            _pauses[pause] = gc.get_threshold()[0] or max(_pauses.values(), default=0)
            gc.set_threshold(0)  # leaves gc.enable and gc.disable to other threads
        yield
    finally:
        try:
            _end(pause)
        except BaseException:  # an interrupt in the middle of it
            _end(pause)
            raise


def _end(pause: object) -> None:
    with _pausing:
        if len(_pauses) == 1 and not gc.get_threshold()[0]:  # nobody else has set it
            gc.set_threshold(_pauses.get(pause, 0))
        _pauses.pop(pause, None)


@contextmanager
def _counters_kept(cache: Any) -> Iterator[None]:
    counters = [(layer, layer.cumulative_length_int) for layer in counting_layers(cache)]
    try:
        yield
    finally:
        for layer, count in counters:
            layer.cumulative_length_int = count
