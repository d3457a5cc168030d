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

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...model.parts import is_ours
from ...runtime.capture import conditions
from ...runtime.capture.between_steps import only_transformers_runs
from ...runtime.capture.decoding import Decoder, harmless, seen_obstacle
from ...runtime.kernels.watch import is_upstreams

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
_thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


@PATCH.probe
def stop_checks_are_deferred_on_some_devices() -> Finding:
    """Look at the devices in ``is_supported``, and at what is used."""
    loop = "GenerationMixin._sample"
    used: dict[str, tuple[str, ...]] = {
        loop: ("get_compiled_call", "_has_unfinished_sequences", "prepare_inputs_for_generation")
    }
    is_new = mentions(code_at(_GENERATION, loop), "DeferredStopCheck")
    if is_new:
        used[loop] = ("get_compiled_call", "DeferredStopCheck", "finish")
        used["DeferredStopCheck.__call__"] = ("slots", "rotate")
    for name, names in used.items():
        missing = set(names) - set(code_at(_GENERATION, name).co_names)
        if missing:
            return drifted(f"{name} does not use {', '.join(sorted(missing))}")
    if is_new and not mentions(code_at(_GENERATION, "DeferredStopCheck.is_supported"), "mps"):
        return fixed("transformers does not ask for Apple's GPUs")
    return broken()


class _Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.decoder: Decoder | None = None
        self.late: _LateAnswers | None = None
        self.device: Any = None  # of the steps, and how many sequences they have
        self.sequences = 0
        self.random: list[Any] = []  # the states of the generator after the last two steps

    def allows_another_step(self) -> bool:
        """Whether only functions of transformers run between two steps."""
        import torch
        from transformers.generation import utils

        if (self.decoder is not None and self.decoder.obstacle) or seen_obstacle(self.model):
            return False
        check = getattr(utils, "StopCheck", None)
        chooses = torch.multinomial if self.samples else torch.argmax
        return (
            only_transformers_runs(self.model, self.arguments)
            and (check is None or all(map(is_upstreams, (check.__call__, check.finish))))
            and isinstance(chooses, BuiltinFunctionType)
        )

    @property
    def samples(self) -> bool:
        return bool(self.arguments["generation_config"].do_sample)

    def note(self, device: Any, sequences: int) -> None:
        """Note where a step has run, and the random numbers that it took."""
        import torch

        self.device, self.sequences = device, sequences
        if self.samples:
            self.random = [*self.random[-1:], torch.cuda.get_rng_state(device)]

    def wait(self) -> None:
        """Wait for a step too many: the memory that it uses may be freed or lent afterwards."""
        import torch

        if self.device is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def take_back_random_numbers(self) -> None:
        """Restore the generator as it was before the last step, if only that step has used it."""
        import torch

        if len(self.random) < 2:
            return
        (before, after), device = self.random, self.device
        again = torch.Generator(device)
        again.set_state(before)
        size = self.sequences, self.model.config.get_text_config(decoder=True).vocab_size
        with harmless("random numbers are not taken back"):  # the text is complete all the same
            scores = torch.ones(size, dtype=torch.float32, device=device)
            torch.multinomial(scores, 1, generator=again)
        was_alone = torch.equal(again.get_state(), after)
        if was_alone and torch.equal(torch.cuda.get_rng_state(device), after):
            torch.cuda.set_rng_state(before, device)


class _LateAnswers:
    """What ``DeferredStopCheck`` does, for transformers < 5.17.

    The streamer is kept from ``_sample``, which waits for the token that it gives to it.
    """

    def __init__(self, call: _Call, streamer: Any) -> None:
        self.call, self.streamer = call, streamer
        self.sequences, self.prompt = call.arguments["input_ids"].shape
        self.length = self.streamed = self.prompt
        self.most = call.arguments["stopping_criteria"].max_length
        self.slots: deque[Any] = deque()  # of two steps: the answer, the tokens, and an event
        self.is_late = False  # whether the answer of the last step is not known yet
        self.too_many = 0

    @staticmethod
    def are_possible(call: _Call) -> bool:
        """Whether the cache is not returned, nor one of the user, and its steps may be captured."""
        config: Any = call.arguments.get("generation_config")
        return (
            is_ours(call.model)
            and getattr(config, "cache_implementation", None) == "static"
            and not config.return_dict_in_generate
            and not getattr(config, "is_assistant", False)
            and call.allows_another_step()
        )

    def have_ended(self, answer: Any) -> bool:
        """Whether the sequences have ended, after a step with this answer on the GPU."""
        self.length += 1
        self.call.note(answer.device, self.sequences)
        decoder = self.call.decoder
        if self.is_late:
            ended, tokens, copied = self.slots[1]
            copied.synchronize()
            with _streaming(self.call):
                self._stream(tokens.clone())
            if ended:
                self.too_many = 1
                return True
        if self.most is not None and self.length >= self.most:
            return True
        self.is_late = decoder is not None and decoder.replayed and decoder.is_known
        if self.is_late and not self.slots:
            self.is_late = self._allocate(answer.device)
        if not self.is_late:
            return bool(answer)
        self.slots[0][0].copy_(answer, non_blocking=True)
        return False

    def note(self, ids: Any) -> None:
        """Note the tokens after a step that was not the last one."""
        import torch

        if not self.is_late:
            if self.streamer is not None:
                self._stream(ids[:, -1].cpu())
            return
        _, tokens, copied = self.slots[0]
        with torch.cuda.device(ids.device):  # whose stream the event is recorded on
            tokens.copy_(ids[:, -1], non_blocking=True)
            copied.record()
        self.slots.rotate()

    def finish(self, ids: Any) -> Any:
        """The generated tokens, without that of a step too many."""
        if self.too_many:
            self.call.take_back_random_numbers()
            ids = ids[:, :-1].contiguous()
        if self.streamer is not None:
            for tokens in ids[:, self.streamed :].cpu().unbind(1):
                self._stream(tokens)
            self.streamer.end()
        return ids

    def _stream(self, tokens: Any) -> None:
        if self.streamer is None:
            return
        self.streamed += 1
        _thread.call = None  # the streamer's queue may call generate
        self.streamer.put(tokens)
        _thread.call = self.call

    def _allocate(self, device: Any) -> bool:
        import torch

        if device.type not in conditions.CAPTURED_ON or not _can_allocate(device):
            return False
        pinned = device.type == "cuda"
        for _ in range(2):
            ended = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=pinned)
            tokens = torch.zeros(self.sequences, dtype=torch.long, device="cpu", pin_memory=pinned)
            self.slots.append((ended, tokens, torch.Event(device=device, blocking=True)))
        return True


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.generation import utils

    outer, call = _running(), _Call(self, kwargs)
    if not hasattr(utils, "DeferredStopCheck") and _LateAnswers.are_possible(call):
        call.late = _LateAnswers(call, kwargs.pop("streamer", None))
    _thread.call = call
    try:
        result = original(self, *args, **kwargs)
        return result if call.late is None else call.late.finish(result)
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
    call = _running()
    return original(device, cache, cache_is_returned, *args, **kwargs) or (
        call is not None
        and call.decoder is not None
        and device.type in conditions.CAPTURED_ON
        and not cache_is_returned
        and not any((*args, *kwargs.values()))  # such as is_assistant
        and call.allows_another_step()
        and _can_allocate(device)
    )


@PATCH.around(_GENERATION, "DeferredStopCheck.__call__", when=_NEW)
def is_last_step(
    original: Any, self: Any, unfinished_sequences: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    call = _running()
    if call is None or call.decoder is None:
        return original(self, unfinished_sequences, tokens, *args, **kwargs)
    call.note(tokens.device, len(tokens))
    with torch.cuda.device(tokens.device):  # whose stream an event is recorded on
        with _streaming(call):
            stops = original(self, unfinished_sequences, tokens, *args, **kwargs)
        if not stops and not (call.decoder.replayed and call.decoder.is_known):
            all_ended, _, copied = self.slots[1]
            copied.synchronize()
            return bool(all_ended)
    return stops


@PATCH.around(_GENERATION, "DeferredStopCheck.finish", when=_NEW)
def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    steps, call = original(self, *args, **kwargs), _running()
    if steps and call is not None:
        call.take_back_random_numbers()
    return steps


@contextmanager
def _streaming(call: _Call) -> Iterator[None]:
    """In this context the streamer, which may raise, gets a token after another step has begun."""
    try:
        yield
    except BaseException:
        call.take_back_random_numbers()
        raise


def _running() -> _Call | None:
    return getattr(_thread, "call", None)


def _late_answers_of(model: Any) -> _LateAnswers | None:
    call = _running()
    return None if call is None or call.model is not model else call.late


def _can_allocate(device: Any) -> bool:
    """Whether page-locked memory can be allocated as ``DeferredStopCheck`` does."""
    import torch

    try:
        torch.zeros((), pin_memory=device.type == "cuda")
    except RuntimeError:  # another default device, or no memory
        return False
    return True
