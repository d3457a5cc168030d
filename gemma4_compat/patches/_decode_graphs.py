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

from ..model.hooks import execution_device, offload_hook
from ..model.parts import tower_of
from ._cache_memory import Memory, full_layers, layers_of
from ._cuda_graph import CaptureFailed, NotCaptured, Step
from ._forward_lock import lock_of
from ._int8_outliers import can_search, has_threshold, outliers_on_the_gpu
from ._not_copied import NotCopied, attached
from ._page_locked import in_place_of
from ._rms_norm import norms_in_one_kernel
from ._snapshot import Snapshot, address, own_tensors
from ._streaming import captured, first_layers, why_not_streamed
from ._two_branches import side_by_side

logger = logging.getLogger(__name__)

_VERSIONS = 3  # per model: enough for two adapters that take turns, and no adapter
_MEMORIES = 2  # free ones, per model
_TOWERS = ("vision", "audio")
#: The inputs of a decode step; any other input belongs to a prompt or to a user's own forward.
_INPUTS = frozenset(
    {
        "input_ids", "position_ids", "attention_mask", "cache_position", "past_key_values",
        "use_cache", "return_dict", "logits_to_keep",
    }
)  # fmt: skip
#: Some releases pass these in each step; the model reads them only beside an image or sound.
_OF_A_PROMPT = frozenset(
    {
        "image_position_ids", "video_position_ids", "num_frames_per_video", "input_features_mask",
        "mm_token_type_ids",
    }
)  # fmt: skip

#: A reason not to capture a step.
_SEARCH = (
    "its 8-bit layers search {} for outliers, which needs the CPU in each step "
    "(BitsAndBytesConfig(llm_int8_threshold=0) turns the search off)"
)

#: Device types that have CUDA graphs.
CAPTURED_ON = ("cuda",)


def decoding_of(model: Any) -> Decoding:
    """The ``Decoding`` of a model, created at the first call."""
    return attached(model, "_decoding", Decoding)  # type: ignore[no-any-return]


def obstacle_of(model: Any) -> str | None:
    """The reason why the decode steps of a model are not captured; ``None`` if they are."""
    return _device_or_obstacle(model, _modules_of_a_step(model))[1]


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
        environment = _environment()
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
        modules = _modules_of_a_step(model)
        config = model.config
        configs = [config, config.get_text_config(decoder=True)]
        self.snapshot = Snapshot(modules.values(), configs)
        self.warm: set[Any] = set()  # the kinds of steps that ran eagerly before
        self.device, self.obstacle = _device_or_obstacle(model, modules)

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
            self.obstacle = self.version.obstacle or _unknown_input(inputs)
            if self.obstacle is not None:
                return ()
            own = {k: v for k, v in inputs.items() if k in _INPUTS and v is not cache}
            leaves, spec = tree_flatten(own)
            kind = (full_layers(cache), spec, *(_kind(leaf) for leaf in leaves))
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
            modules = _modules_of_a_step(self.model).values()
            if len(inputs["input_ids"]) > 1 and any(map(has_threshold, modules)):
                raise NotCaptured(_SEARCH.format("the inputs of several sequences"))
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


def _unknown_input(inputs: dict[str, Any]) -> str | None:
    """The reason why a step with these inputs is not captured; ``None`` if it is."""
    known = _INPUTS
    if isinstance(inputs.get("attention_mask"), dict):  # the masks include those of the prompt
        known = known | _OF_A_PROMPT
    unknown = sorted(
        name for name, value in inputs.items() if name not in known and value is not None
    )
    return f"its forward is called with {', '.join(unknown)}" if unknown else None


def _kind(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf


def _environment() -> tuple[Any, ...]:
    """The settings of PyTorch that decide which kernels run."""
    import torch

    cuda = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _modules_of_a_step(model: Any) -> dict[str, Any]:
    """The modules that a decode step runs, by name: all but the towers."""
    return {name: module for name, module in model.named_modules() if tower_of(name) not in _TOWERS}


def _device_or_obstacle(model: Any, modules: dict[str, Any]) -> tuple[Any, str | None]:
    """The GPU to capture on and ``None``, or ``None`` and the reason not to capture."""
    try:
        device = _device_of_a_step(modules)
        _check_repeatable(model, modules, device)
    except NotCaptured as why:
        return None, str(why)
    return device, None


def _device_of_a_step(modules: dict[str, Any]) -> Any:
    """The one GPU that all of these modules compute on.

    Raises:
        NotCaptured: there is no such GPU, or accelerate copies weights to it in each forward, or
            the CPU looks up rows of an embedding.
    """
    import torch

    devices = set()
    for name, module in modules.items():
        own = own_tensors(module)
        if any(address(tensor) is None for tensor in own):
            raise NotCaptured(f"{name} has a tensor without storage")
        hook = offload_hook(module)
        if hook is None:
            devices |= {tensor.device for tensor in own}
        elif not isinstance(module, torch.nn.Embedding):
            devices |= {tensor.device for tensor in own if not tensor.is_meta}
            if any(tensor.is_meta for tensor in own):
                why = why_not_streamed(hook, module)
                if why is not None:
                    raise NotCaptured(f"{name} is offloaded, and {why}")
                devices.add(execution_device(module))
        elif getattr(in_place_of(hook), "nbytes", None) is None:
            raise NotCaptured(f"the CPU looks up the rows of {name}")
    if len(devices) != 1 or next(iter(devices)).type not in CAPTURED_ON:
        named = " and ".join(sorted(map(str, devices)))
        raise NotCaptured(f"its decoder is on {named}, not on one GPU")
    return devices.pop()


def _check_repeatable(model: Any, modules: dict[str, Any], device: Any) -> None:
    """Check that a graph repeats all that the forward does.

    Raises:
        NotCaptured: the model is compiled or in training mode, has forward hooks, or has 8-bit
            layers that cannot search for outliers on this GPU.
    """
    from torch.nn.modules import module as nn_module

    if any(module.training for module in modules.values()):
        raise NotCaptured("the model is in training mode")
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        raise NotCaptured("there are forward hooks for all modules")
    for name, module in modules.items():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(str(hook.__module__).startswith("gemma4_compat.") for hook in hooks):
            raise NotCaptured(f"{name} has a forward hook")
        if has_threshold(module) and not can_search(device):
            raise NotCaptured(_SEARCH.format("their inputs"))
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise NotCaptured("the model is compiled")
