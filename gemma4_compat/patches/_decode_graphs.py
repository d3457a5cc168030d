"""Decode steps as CUDA graphs: a step of one token is captured once, and replayed for each token.

A ``Decoding`` belongs to one model.  Its ``Version``s are what the model was when steps were
captured (weights, adapters, settings).  Its ``Memory``s are the tensors of static caches; the
``Step``s that write to them, the graphs, are kept with them.
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
from ._not_copied import NotCopied, attached
from ._page_locked import in_place_of
from ._snapshot import Snapshot, own_tensors
from ._streaming import captured, first_layers, why_not_streamed

logger = logging.getLogger(__name__)

_VERSIONS = 3  # for a model: two adapters that take turns, and none
_MEMORIES = 2  # that no cache uses, for a model
_TOWERS = ("vision", "audio")
#: what a decode step may be called with; all else is a prompt's, or a user's own
_INPUTS = frozenset(
    {
        "input_ids", "position_ids", "attention_mask", "cache_position", "past_key_values",
        "use_cache", "return_dict", "logits_to_keep",
    }
)  # fmt: skip
#: what some releases pass in each step, and the model reads beside an image or sound alone
_OF_A_PROMPT = frozenset(
    {
        "image_position_ids", "video_position_ids", "num_frames_per_video", "input_features_mask",
        "mm_token_type_ids",
    }
)  # fmt: skip

#: kinds of devices that have CUDA graphs
CAPTURED_ON = ("cuda",)


def decoding_of(model: Any) -> Decoding:
    """What is kept for a model, from the first call on."""
    return attached(model, "_decoding", Decoding)  # type: ignore[no-any-return]


def obstacle_of(model: Any) -> str | None:
    """Why the decode steps of a model are not captured; ``None`` if they are."""
    return _device_or_obstacle(model, _modules_of_a_step(model))[1]


def forget() -> None:
    """Free the graphs of all models."""
    for each in list(_all):
        each.forget()


class Decoding(NotCopied):
    """The captured decode steps of one model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.versions: list[Version] = []
        self.memories: list[Memory] = []
        self.said: set[str] = set()  # reasons that the user was given
        self.advised = False
        _all.add(self)

    def forget(self) -> None:
        with self.lock:
            self.versions, self.memories = [], []

    def version(self, model: Any) -> Version:
        """The model as it is now."""
        environment = _environment()
        with self.lock:
            for version in self.versions:
                change = version.change(environment)
                if change is None:
                    self.versions.remove(version)
                    break
                logger.debug("decode steps of before are not used: %s changed", change)
            else:
                version = Version(model, environment)
            self.versions = [version, *self.versions][:_VERSIONS]
            for memory in self.memories:
                memory.steps = {k: v for k, v in memory.steps.items() if k[0] in self.versions}
            return version

    def memory_of(self, cache: Any) -> Memory:
        """The memory that a cache uses."""
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
        """Have a new cache use the memory of one that is gone, if there is one like it.

        If there is none, what is free is freed: a longer cache may need the room.
        """
        with self.lock:
            free = [memory for memory in self.memories if memory.is_free()]
            if not free or any(layer.is_initialized for layer in layers_of(cache)):
                return
            fitting = [each for each in free if each.fits(cache, batch_size)]
            if fitting:
                fitting[-1].lend_to(cache)
            else:
                for memory in free:
                    self.memories.remove(memory)


_all: weakref.WeakSet[Decoding] = weakref.WeakSet()


class Version:
    """A model as it was when steps were captured."""

    def __init__(self, model: Any, environment: Any) -> None:
        self.environment = environment
        modules = _modules_of_a_step(model)
        config = model.config
        configs = [config, config.get_text_config(decoder=True)]
        self.snapshot = Snapshot(modules.values(), configs)
        self.warm: set[Any] = set()  # kinds of steps that ran
        self.device, self.obstacle = _device_or_obstacle(model, modules)

    def change(self, environment: Any) -> str | None:
        """What is not as it was; ``None`` if nothing changed."""
        if environment != self.environment:
            return "a setting of PyTorch"
        return self.snapshot.change()


class Decoder:
    """What ``generate`` calls in place of the model, for the length of one call.

    It captures and replays steps of one token.  All else it passes on to the model.
    """

    def __init__(self, model: Any, say: Any) -> None:
        self.model, self.say = model, say
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
        if self.version is None:
            self.version = self.decoding.version(self.model)
            self.obstacle = self.version.obstacle
        if self.obstacle is None:
            self.obstacle = _unknown_input(inputs)
        if self.obstacle is None:
            try:
                return self._step(self.version, cache, inputs)
            except NotCaptured as why:
                self.obstacle = str(why)
                if isinstance(why, CaptureFailed):
                    self.version.obstacle = self.obstacle
        self.say(self.obstacle)
        return self.model(**inputs)

    def _step(self, version: Version, cache: Any, inputs: dict[str, Any]) -> Any:
        from torch.utils._pytree import tree_flatten

        own = {k: v for k, v in inputs.items() if k in _INPUTS and v is not cache}
        leaves, spec = tree_flatten(own)
        kind = (full_layers(cache), spec, *(_kind(leaf) for leaf in leaves))
        memory = self.decoding.memory_of(cache)
        step = memory.steps.get((version, kind))
        if step is None:
            if kind not in version.warm:
                version.warm.add(kind)
                return self.model(**inputs)
            first = first_layers(_modules_of_a_step(self.model).values())
            # Another thread must not send layers meanwhile.
            with lock_of(self.model), captured(first) as send_ahead:

                def model(**kwargs: Any) -> Any:
                    send_ahead()
                    return self.model(**kwargs)

                step = Step(model, version.device, cache, memory, leaves, spec)
            memory.steps[version, kind] = step
        return step.replay(cache, leaves)


def _unknown_input(inputs: dict[str, Any]) -> str | None:
    """Why a step with these inputs is not captured."""
    known = _INPUTS
    if isinstance(inputs.get("attention_mask"), dict):  # masks that the prompt had its part in
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
    """The settings of PyTorch that choose kernels."""
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
    """What a decode step runs, by name: all but the towers."""
    return {name: module for name, module in model.named_modules() if tower_of(name) not in _TOWERS}


def _device_or_obstacle(model: Any, modules: dict[str, Any]) -> tuple[Any, str | None]:
    """The GPU that a step is captured on, or why it is not captured."""
    try:
        device = _device_of_a_step(modules)
        _refuse_what_is_watched(model, modules)
    except NotCaptured as why:
        return None, str(why)
    return device, None


def _device_of_a_step(modules: dict[str, Any]) -> Any:
    """The GPU that all of these modules compute on.

    Raises:
        NotCaptured: there is no such GPU, or weights come to it for each forward.
    """
    import torch

    devices = set()
    for name, module in modules.items():
        own = own_tensors(module)
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
            raise NotCaptured(f"the rows of {name} are looked up by the CPU")
    if len(devices) != 1 or next(iter(devices)).type not in CAPTURED_ON:
        named = " and ".join(sorted(map(str, devices)))
        raise NotCaptured(f"its decoder is on {named}, not on one GPU")
    return devices.pop()


def _refuse_what_is_watched(model: Any, modules: dict[str, Any]) -> None:
    """Refuse a model whose forward runs code of others, or that a graph would not repeat.

    Raises:
        NotCaptured: why.
    """
    from torch.nn.modules import module as nn_module

    if any(module.training for module in modules.values()):
        raise NotCaptured("the model is in training mode")
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        raise NotCaptured("there are forward hooks for all modules")
    for name, module in modules.items():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(str(hook.__module__).startswith("gemma4_compat") for hook in hooks):
            raise NotCaptured(f"{name} has a forward hook")
        state = getattr(module, "state", None)
        if getattr(state, "threshold", 0) and type(module).__name__ == "Linear8bitLt":
            raise NotCaptured(
                "its 8-bit layers search their inputs for outliers, which needs the CPU in each "
                "step; BitsAndBytesConfig(llm_int8_threshold=0) does without"
            )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise NotCaptured("the model is compiled")
