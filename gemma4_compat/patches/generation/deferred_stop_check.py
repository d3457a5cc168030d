"""The GPU waits for Python between two captured decode steps.

After each token, ``generate`` reads from the GPU whether all sequences have ended.  Only then it
prepares the next step, and the GPU has nothing to do meanwhile.  transformers 5.17 adds
``DeferredStopCheck``, which reads the answer while the next step runs, and drops the token of the
step that was one too many.  ``DeferredStopCheck.is_supported`` allows it on Apple's GPUs only: "we
should enable it for cuda if we observe perf gains".

The fix allows it where the steps are replayed (``captured_decoding``).  The step that is one too
many runs only if nobody can notice it: ``generate`` waits as before with a cache that it returns,
with ``synced_gpus``, where a step is not replayed, and where any other function than those of
transformers and PyTorch may run between two steps, such as a logits processor, a stopping
criterion, a streamer, a method of a subclass, or a function in the place of
``torch.nn.functional.softmax``.  Random numbers that were drawn for the dropped token are drawn
again by the next call.  A streamer gets each token one step later.
"""

from __future__ import annotations

import sys
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...runtime.capture import stop_checks
from ...runtime.capture.decoding import Decoder

PATCH = Patch(
    name="deferred_stop_check",
    kind=Kind.FAST,
    symptom="generate is slow on a GPU: it waits for Python between two captured decode steps",
    affects=("transformers>=5.17",),
    requires=("captured_decoding",),
    unreported="transformers allows it on Apple's GPUs, and asks for figures of others.",
)

_GENERATION = "transformers.generation.utils"
_USED = {
    "GenerationMixin._sample": {"get_compiled_call", "DeferredStopCheck", "finish"},
    "DeferredStopCheck.__call__": {"streamer", "is_first_step"},
    "DeferredStopCheck.finish": {"streamer"},
}


@PATCH.probe
def stop_checks_are_deferred_on_some_devices() -> Finding:
    """Look at the devices in ``is_supported``, and at what is used."""
    for name, names in _USED.items():
        missing = names.difference(code_at(_GENERATION, name).co_names)
        if missing:
            return drifted(f"{name} does not use {', '.join(sorted(missing))}")
    if not mentions(code_at(_GENERATION, "DeferredStopCheck.is_supported"), "mps"):
        return fixed("transformers does not ask for Apple's GPUs")
    return broken()


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    call = stop_checks.Call(self, kwargs, _is_called_by_generate())
    with stop_checks.runs(call):
        return original(self, *args, **kwargs)


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.get_compiled_call")
def get_compiled_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    function, call = original(self, *args, **kwargs), stop_checks.running()
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
    if original(device, cache, cache_is_returned, *args, **kwargs):
        return True
    call = stop_checks.running()
    if call is None or cache_is_returned or any((*args, *kwargs.values())):  # as is_assistant
        return False
    call.defers = call.allows_another_step()
    return call.defers


@PATCH.around(_GENERATION, "DeferredStopCheck.__call__")
def is_last_step(
    original: Any, self: Any, unfinished_sequences: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    call = stop_checks.running()
    if call is None or not call.defers:
        return original(self, unfinished_sequences, tokens, *args, **kwargs)
    call.note_random_numbers()
    try:
        with torch.cuda.device(call.device):  # whose stream an event is recorded on
            stops = original(self, unfinished_sequences, tokens, *args, **kwargs)
    except BaseException:  # of the streamer, which gets a token after another step has begun
        call.take_back_random_numbers()
        raise
    if stops or call.step_is_known():
        return stops
    if not unfinished_sequences.any():
        return True  # and this step's token counts
    if self.streamer is not None:
        self.is_first_step = True  # the next call streams nothing of this one
        self.streamer.put(tokens.cpu())
    return False


@PATCH.around(_GENERATION, "DeferredStopCheck.finish")
def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    steps, call = original(self, *args, **kwargs), stop_checks.running()
    if steps and call is not None and call.defers:
        call.take_back_random_numbers()
    return steps


def _is_called_by_generate() -> bool:
    """Whether ``_sample`` is called by transformers, not by a subclass or ``custom_generate``."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_GENERATION, "generate")
