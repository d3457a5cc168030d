"""The GPU waits for Python between two captured decode steps.

After each token, ``generate`` reads from the GPU whether all sequences have ended.  Only then it
prepares the next step, and the GPU has nothing to do meanwhile.  transformers 5.17 adds
``DeferredStopCheck``, which reads the answer while the next step runs, and drops the token of the
step that was one too many.  ``DeferredStopCheck.is_supported`` allows it on Apple's GPUs only: "we
should enable it for cuda if we observe perf gains".

The fix allows it where the steps are replayed (``captured_decoding``).  For older releases it does
the same itself, and gives the tokens to the streamer.  The step that is one too many runs only if
nobody can notice it: ``generate`` waits as before with a cache that it returns, with
``synced_gpus``, where a step is not replayed, and where any other function than transformers' own
may run between two steps, such as a logits processor, a stopping criterion, a streamer or a method
of a subclass.  Random numbers that were drawn for the dropped token are drawn again by the next
call.  A streamer gets each token one step later.
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
    kind=Kind.EXACT,
    symptom="generate is slow on a GPU: it waits for Python between two captured decode steps",
    affects=("transformers",),
    changes=(
        "generate begins the next captured decode step before it reads whether the sequences have "
        "ended.  A streamer gets each token one step later."
    ),
    requires=("captured_decoding",),
    unreported="transformers allows it on Apple's GPUs, and asks for figures of others.",
)

_GENERATION = "transformers.generation.utils"
_OLD, _NEW = "transformers<5.17", "transformers>=5.17"


@PATCH.probe
def stop_checks_are_deferred_on_some_devices() -> Finding:
    """Look at the devices in ``is_supported``, and at what is used."""
    loop = "GenerationMixin._sample"
    used: dict[str, tuple[str, ...]] = {
        loop: ("get_compiled_call", "_has_unfinished_sequences", "prepare_inputs_for_generation")
    }
    if _is_new():
        used[loop] = ("get_compiled_call", "DeferredStopCheck", "finish")
        used["DeferredStopCheck.__call__"] = ("slots", "rotate", "streamer", "is_first_step")
    for name, names in used.items():
        missing = set(names) - set(code_at(_GENERATION, name).co_names)
        if missing:
            return drifted(f"{name} does not use {', '.join(sorted(missing))}")
    if _is_new() and not mentions(code_at(_GENERATION, "DeferredStopCheck.is_supported"), "mps"):
        return fixed("transformers does not ask for Apple's GPUs")
    return broken()


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    call = stop_checks.Call(self, kwargs, _is_called_by_generate())
    if not _is_new() and stop_checks.LateAnswers.are_possible(call):
        call.late = stop_checks.LateAnswers(call, kwargs.pop("streamer", None))
    try:
        with stop_checks.runs(call):
            result = original(self, *args, **kwargs)
            return result if call.late is None else call.late.finish(result)
    finally:
        call.end()


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


@PATCH.around(_GENERATION, "GenerationMixin._has_unfinished_sequences", when=_OLD)
def has_unfinished_sequences(
    original: Any, self: Any, this_peer_finished: Any, *args: Any, **kwargs: Any
) -> Any:
    late = _late_answers_of(self)
    if late is None or this_peer_finished is False:  # before the first token
        return original(self, this_peer_finished, *args, **kwargs)
    return not late.have_ended(this_peer_finished)


@PATCH.around(_GENERATION, "GenerationMixin.prepare_inputs_for_generation", when=_OLD)
def prepare_inputs_for_generation(
    original: Any, self: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    late = _late_answers_of(self)
    if late is not None and late.length > late.prompt:
        late.note(input_ids)
    return original(self, input_ids, *args, **kwargs)


@PATCH.around(_GENERATION, "DeferredStopCheck.is_supported", when=_NEW)
def is_supported(
    original: Any, device: Any, cache: Any, cache_is_returned: Any, *args: Any, **kwargs: Any
) -> Any:
    call = stop_checks.running()
    return original(device, cache, cache_is_returned, *args, **kwargs) or (
        call is not None
        and call.decoder is not None
        and not cache_is_returned
        and not any((*args, *kwargs.values()))  # such as is_assistant
        and call.allows_another_step()
    )


@PATCH.around(_GENERATION, "DeferredStopCheck.__call__", when=_NEW)
def is_last_step(
    original: Any, self: Any, unfinished_sequences: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    call = stop_checks.running()
    if call is None or call.decoder is None:
        return original(self, unfinished_sequences, tokens, *args, **kwargs)
    call.note()
    with torch.cuda.device(call.device):  # whose stream an event is recorded on
        with stop_checks.streaming(call):
            stops = original(self, unfinished_sequences, tokens, *args, **kwargs)
        if stops or call.step_is_known():
            return stops
        all_ended, streamed, copied = self.slots[1]
        copied.synchronize()
        if not all_ended and self.streamer is not None:
            self.is_first_step = True  # the next call streams nothing of this one
            self.streamer.put(streamed.clone())
        return bool(all_ended)


@PATCH.around(_GENERATION, "DeferredStopCheck.finish", when=_NEW)
def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    steps, call = original(self, *args, **kwargs), stop_checks.running()
    if steps and call is not None:
        call.take_back_random_numbers()
    return steps


def _is_new() -> bool:
    return hasattr(sys.modules[_GENERATION], "DeferredStopCheck")


def _late_answers_of(model: Any) -> stop_checks.LateAnswers | None:
    call = stop_checks.running()
    return None if call is None or call.model is not model else call.late


def _is_called_by_generate() -> bool:
    """Whether ``_sample`` is called by transformers, not by a subclass or ``custom_generate``."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_GENERATION, "generate")
