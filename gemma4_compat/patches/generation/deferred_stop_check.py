"""The GPU waits for Python between two captured decode steps.

After each token, ``generate`` reads from the GPU whether all sequences have ended.  Only then it
prepares the next step, and the GPU has nothing to do meanwhile.  transformers 5.17 adds
``DeferredStopCheck``, which reads the answer while the next step runs, and drops the token of the
step that was one too many.  ``DeferredStopCheck.is_supported`` allows it on Apple's GPUs only: "we
should enable it for cuda if we observe perf gains".

The fix allows it where the steps are replayed (``captured_decoding``).  The step that is one too
many runs only if nobody can notice it.  ``generate`` waits as before with ``synced_gpus``, with a
cache that it returns, with a streamer, logits processors, stopping criteria or methods of the model
that are not transformers' own, and in steps that are not replayed, where hooks run.  Random numbers
that were drawn for the dropped token are drawn again by the next call.  A streamer of transformers
gets each token one step later.
"""

from __future__ import annotations

import threading
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...runtime.capture import conditions
from ...runtime.capture.decoding import Decoder
from ...runtime.kernels.watch import KNOWN, is_upstreams

PATCH = Patch(
    name="deferred_stop_check",
    kind=Kind.EXACT,
    symptom="generate is slow on a GPU: it waits for Python between two captured decode steps",
    affects=("transformers>=5.17",),
    changes=(
        "generate begins the next captured decode step before it reads whether the sequences have "
        "ended.  transformers' streamers get each token one step later."
    ),
    requires=("captured_decoding",),
    unreported="transformers allows it on Apple's GPUs, and asks for figures of others.",
)

_GENERATION = "transformers.generation.utils"
_STREAMERS = "transformers.generation.streamers"

_thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


@PATCH.probe
def stop_checks_are_deferred_on_some_devices() -> Finding:
    """Look at the devices in ``is_supported``, and at what ``_sample`` uses."""
    names = code_at(_GENERATION, "GenerationMixin._sample").co_names
    missing = {"get_compiled_call", "DeferredStopCheck", "is_supported", "finish"} - set(names)
    if missing:
        return drifted(f"GenerationMixin._sample does not use {', '.join(sorted(missing))}")
    if not mentions(code_at(_GENERATION, "DeferredStopCheck.is_supported"), "mps"):
        return fixed("transformers does not ask for Apple's GPUs")
    return broken()


class _Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.decoder: Decoder | None = None
        #: The generator's device, and its states after the last two steps.
        self.random: tuple[Any, list[Any]] = None, []

    def allows_another_step(self) -> bool:
        """Whether only functions of transformers run between two steps."""
        given, model = self.arguments, self.model
        methods = model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation
        lists = given.get("logits_processor"), given.get("stopping_criteria")
        streamer = given.get("streamer")
        return (
            self.decoder is not None
            and (streamer is None or type(streamer).__module__ == _STREAMERS)
            and not given.get("synced_gpus")
            and all(map(is_upstreams, methods))
            and all(each is not None and all(map(_is_upstreams_own, each)) for each in lists)
        )

    def note_random_numbers(self, device: Any) -> None:
        import torch

        if self.arguments["generation_config"].do_sample:
            self.random = device, [*self.random[1][-1:], torch.cuda.get_rng_state(device)]

    def take_back_random_numbers(self) -> None:
        """Restore the state before the last step, unless others have drawn numbers since."""
        import torch

        device, states = self.random
        if len(states) == 2 and torch.equal(torch.cuda.get_rng_state(device), states[1]):
            torch.cuda.set_rng_state(states[0], device)


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    outer, _thread.call = _running(), _Call(self, kwargs)
    try:
        return original(self, *args, **kwargs)
    finally:
        _thread.call = outer


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.get_compiled_call")
def get_compiled_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    function, call = original(self, *args, **kwargs), _running()
    if call is not None and call.model is self and isinstance(function, Decoder):
        call.decoder = function
    return function


@PATCH.around(_GENERATION, "DeferredStopCheck.is_supported")
def is_supported(
    original: Any, device: Any, cache: Any, cache_is_returned: Any, is_assistant: Any
) -> Any:
    call = _running()
    return original(device, cache, cache_is_returned, is_assistant=is_assistant) or (
        call is not None
        and device.type in conditions.CAPTURED_ON
        and not cache_is_returned
        and not is_assistant
        and call.allows_another_step()
    )


@PATCH.around(_GENERATION, "DeferredStopCheck.__call__")
def is_last_step(
    original: Any, self: Any, unfinished_sequences: Any, tokens: Any, length: Any
) -> Any:
    call = _running()
    if call is None or call.decoder is None:
        return original(self, unfinished_sequences, tokens, length)
    call.note_random_numbers(tokens.device)
    stops = original(self, unfinished_sequences, tokens, length)
    if not stops and not call.decoder.replayed:
        all_ended, _, copied = self.slots[1]
        copied.synchronize()
        return bool(all_ended)
    return stops


@PATCH.around(_GENERATION, "DeferredStopCheck.finish")
def finish(original: Any, self: Any) -> Any:
    steps, call = original(self), _running()
    if steps and call is not None:
        call.take_back_random_numbers()
    return steps


def _running() -> _Call | None:
    return getattr(_thread, "call", None)


def _is_upstreams_own(processor: Any) -> bool:
    """Whether a logits processor or stopping criterion runs no function of the user."""
    kind = type(processor)
    return (
        kind.__module__.partition(".")[0] in KNOWN
        and is_upstreams(kind.__call__)
        and not any(map(callable, vars(processor).values()))
    )
