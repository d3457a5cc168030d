"""The GPU waits for Python between two captured decode steps.

After each token, ``generate`` reads from the GPU whether all sequences have ended.  Only then it
prepares the next step, and the GPU has nothing to do meanwhile.  transformers 5.17 adds
``DeferredStopCheck``, which reads the answer while the next step runs, and drops the token of the
step that was one too many.  ``DeferredStopCheck.is_supported`` allows it on Apple's GPUs only: "we
should enable it for cuda if we observe perf gains".

The fix allows it where the steps are replayed (``captured_decoding``).  The step that is one too
many runs only if nobody can notice it: ``generate`` waits as before with a cache that it returns,
with ``synced_gpus``, where a step is not replayed, and where any other function than transformers'
own may run between two steps, such as a logits processor, a stopping criterion, a streamer or a
method of a subclass.  Random numbers that were drawn for the dropped token are drawn again by the
next call.  A streamer gets each token one step later.
"""

from __future__ import annotations

import threading
from types import BuiltinFunctionType
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...runtime.capture import conditions
from ...runtime.capture.between_steps import only_transformers_runs
from ...runtime.capture.decoding import Decoder, harmless, seen_obstacle
from ...runtime.kernels.watch import is_upstreams

PATCH = Patch(
    name="deferred_stop_check",
    kind=Kind.EXACT,
    symptom="generate is slow on a GPU: it waits for Python between two captured decode steps",
    affects=("transformers>=5.17",),
    changes=(
        "generate begins the next captured decode step before it reads whether the sequences have "
        "ended.  A streamer gets each token one step later."
    ),
    requires=("captured_decoding",),
    unreported="transformers allows it on Apple's GPUs, and asks for figures of others.",
)

_GENERATION = "transformers.generation.utils"
_thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


@PATCH.probe
def stop_checks_are_deferred_on_some_devices() -> Finding:
    """Look at the devices in ``is_supported``, and at what is used."""
    used = {
        "GenerationMixin._sample": ("get_compiled_call", "DeferredStopCheck", "finish"),
        "DeferredStopCheck.__call__": ("slots", "rotate"),
    }
    for name, names in used.items():
        missing = set(names) - set(code_at(_GENERATION, name).co_names)
        if missing:
            return drifted(f"{name} does not use {', '.join(sorted(missing))}")
    if not mentions(code_at(_GENERATION, "DeferredStopCheck.is_supported"), "mps"):
        return fixed("transformers does not ask for Apple's GPUs")
    return broken()


class _Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.decoder: Decoder | None = None
        self.tokens: Any = None  # of the last step
        self.random: list[Any] = []  # the states of the generator after the last two steps

    def allows_another_step(self) -> bool:
        """Whether only functions of transformers run between two steps."""
        import torch
        from transformers.generation.utils import StopCheck

        if self.decoder is None or self.decoder.obstacle or seen_obstacle(self.model):
            return False
        chooses = torch.multinomial if self.samples else torch.argmax
        return (
            only_transformers_runs(self.model, self.arguments)
            and all(map(is_upstreams, (StopCheck.__call__, StopCheck.finish)))
            and isinstance(chooses, BuiltinFunctionType)
        )

    @property
    def samples(self) -> bool:
        return bool(self.arguments["generation_config"].do_sample)

    def note(self, tokens: Any) -> None:
        """Note the tokens of a step, and the random numbers that they took."""
        import torch

        self.tokens = tokens
        if self.samples:
            self.random = [*self.random[-1:], torch.cuda.get_rng_state(tokens.device)]

    def wait(self) -> None:
        """Wait for a step too many: the memory that it uses may be freed or lent afterwards."""
        import torch

        if self.tokens is not None:
            torch.cuda.current_stream(self.tokens.device).synchronize()

    def take_back_random_numbers(self) -> None:
        """Restore the generator as it was before the last step, if only that step has used it."""
        import torch

        if len(self.random) < 2:
            return
        (before, after), device = self.random, self.tokens.device
        again = torch.Generator(device)
        again.set_state(before)
        size = len(self.tokens), self.model.config.get_text_config(decoder=True).vocab_size
        with harmless("random numbers are not taken back"):  # the text is complete all the same
            scores = torch.ones(size, dtype=torch.float32, device=device)
            torch.multinomial(scores, 1, generator=again)
        was_alone = torch.equal(again.get_state(), after)
        if was_alone and torch.equal(torch.cuda.get_rng_state(device), after):
            torch.cuda.set_rng_state(before, device)


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    outer, call = _running(), _Call(self, kwargs)
    _thread.call = call
    try:
        return original(self, *args, **kwargs)
    finally:
        _thread.call = outer
        call.wait()


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.get_compiled_call")
def get_compiled_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    function, call = original(self, *args, **kwargs), _running()
    if (
        call is not None
        and call.decoder is None  # else it is for the chunks of a prompt
        and call.model is self
        and isinstance(function, Decoder)
    ):
        call.decoder = function
    return function


@PATCH.around(_GENERATION, "DeferredStopCheck.is_supported")
def is_supported(
    original: Any, device: Any, cache: Any, cache_is_returned: Any, *args: Any, **kwargs: Any
) -> Any:
    call = _running()
    return original(device, cache, cache_is_returned, *args, **kwargs) or (
        call is not None
        and device.type in conditions.CAPTURED_ON
        and not cache_is_returned
        and not any((*args, *kwargs.values()))  # such as is_assistant
        and call.allows_another_step()
        and _can_allocate(device)
    )


@PATCH.around(_GENERATION, "DeferredStopCheck.__call__")
def is_last_step(
    original: Any, self: Any, unfinished_sequences: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    call = _running()
    if call is None or call.decoder is None:
        return original(self, unfinished_sequences, tokens, *args, **kwargs)
    call.note(tokens)
    with torch.cuda.device(tokens.device):  # whose stream an event is recorded on
        stops = original(self, unfinished_sequences, tokens, *args, **kwargs)
        if not stops and not (call.decoder.replayed and call.decoder.is_known):
            all_ended, _, copied = self.slots[1]
            copied.synchronize()
            return bool(all_ended)
    return stops


@PATCH.around(_GENERATION, "DeferredStopCheck.finish")
def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    steps, call = original(self, *args, **kwargs), _running()
    if steps and call is not None:
        call.take_back_random_numbers()
    return steps


def _running() -> _Call | None:
    return getattr(_thread, "call", None)


def _can_allocate(device: Any) -> bool:
    """Whether page-locked memory can be allocated as ``DeferredStopCheck`` does."""
    import torch

    try:
        torch.zeros((), pin_memory=device.type == "cuda")
    except RuntimeError:  # another default device, or no memory
        return False
    return True
