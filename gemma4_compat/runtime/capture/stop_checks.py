"""A call of ``_sample``, in which a step begins before it is known whether the text has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

from ...model.parts import is_ours
from ..kernels.watch import is_upstreams
from . import conditions
from .between_steps import only_transformers_runs
from .decoding import Decoder, harmless, seen_obstacle

_thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


def running() -> Call | None:
    return getattr(_thread, "call", None)


@contextmanager
def runs(call: Call | None) -> Iterator[None]:
    """In this context, ``running`` returns this call."""
    outer, _thread.call = running(), call
    try:
        yield
    finally:
        _thread.call = outer


class Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any], of_generate: bool) -> None:
        self.model, self.arguments = model, arguments
        self.of_generate = of_generate  # else its caller has the cache, which has a token too many
        self.decoder: Decoder | None = None
        self.late: LateAnswers | None = None
        self.is_ahead = False  # whether a step may have begun early
        self.random: list[Any] = []  # the states of the generator after the last two steps

    @property
    def device(self) -> Any:
        return self.arguments["input_ids"].device

    @property
    def samples(self) -> bool:
        return bool(self.arguments["generation_config"].do_sample)

    def allows_another_step(self) -> bool:
        """Whether only functions of transformers run between two steps."""
        import torch
        from transformers.generation import utils

        if (self.decoder is not None and self.decoder.obstacle) or seen_obstacle(self.model):
            return False
        if not self.of_generate or self.device.type not in conditions.CAPTURED_ON:
            return False
        check = getattr(utils, "StopCheck", None)
        chooses = torch.multinomial if self.samples else torch.argmax
        return (
            only_transformers_runs(self.model, self.arguments, ahead=True)
            and (check is None or all(map(is_upstreams, (check.__call__, check.finish))))
            and type(chooses) is BuiltinFunctionType
            and _can_allocate(self.device)
        )

    def step_is_known(self) -> bool:
        """Whether the last step was replayed, and no code of the user made its inputs."""
        return self.decoder is not None and self.decoder.replayed and self.decoder.is_known

    def note(self) -> None:
        """Note that a step has run, and the random numbers that it took."""
        import torch

        self.is_ahead = True
        if self.samples:
            self.random = [*self.random[-1:], torch.cuda.get_rng_state(self.device)]

    def end(self) -> None:
        """Wait for a step too many: the memory that it uses may be freed or lent afterwards."""
        import torch

        self.late = None  # which refers to this call, that has the cache
        if self.is_ahead:
            torch.cuda.current_stream(self.device).synchronize()

    def take_back_random_numbers(self) -> None:
        """Restore the generator as it was before the last step, if only that step has used it."""
        import torch

        if len(self.random) < 2:
            return
        (before, after), device = self.random, self.device
        again = torch.Generator(device)
        again.set_state(before)
        width = self.model.config.get_text_config(decoder=True).vocab_size
        width = getattr(self.model.get_output_embeddings(), "out_features", width)
        with harmless("random numbers are not taken back"):  # the text is complete all the same
            size = len(self.arguments["input_ids"]), width
            scores = torch.ones(size, dtype=torch.float32, device=device)
            torch.multinomial(scores, 1, generator=again)
        was_alone = torch.equal(again.get_state(), after)
        if was_alone and torch.equal(torch.cuda.get_rng_state(device), after):
            torch.cuda.set_rng_state(before, device)


class LateAnswers:
    """What ``DeferredStopCheck`` does, for transformers < 5.17.

    The streamer is kept from ``_sample``, which waits for the token that it gives to it.
    """

    def __init__(self, call: Call, streamer: Any) -> None:
        import torch

        self.call, self.streamer = call, streamer
        count, self.prompt = call.arguments["input_ids"].shape
        self.length = self.streamed = self.prompt
        self.most = call.arguments["stopping_criteria"].max_length
        self.is_late = False  # whether the answer of the last step is not known yet
        self.is_too_many = False  # whether the last step is
        pinned = {"device": "cpu", "pin_memory": call.device.type == "cuda"}
        self.ended: Any = torch.zeros((), dtype=torch.bool, **pinned)  # the answer of a step
        self.tokens: Any = torch.zeros(count, dtype=torch.long, **pinned)
        self.copied = torch.Event(device=call.device, blocking=True)  # then both are known

    @staticmethod
    def are_possible(call: Call) -> bool:
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
        self.call.note()
        if self.is_late:
            self.is_too_many = self._late_answer()
            if self.streamer is not None:
                with streaming(self.call):
                    self._stream(self.tokens.clone())
            if self.is_too_many:
                return True
        if self.most is not None and self.length >= self.most:
            return True
        self.is_late = self.call.step_is_known()
        if not self.is_late:
            return bool(answer)
        self._copy(self.ended, answer)
        return False

    def note(self, ids: Any) -> None:
        """Note the tokens after a step that was not the last one."""
        if self.streamer is not None and self.is_late:
            self._copy(self.tokens, ids[:, -1])
        elif self.streamer is not None:
            self._stream(ids[:, -1].cpu())

    def finish(self, ids: Any) -> Any:
        """The generated tokens, without that of a step too many."""
        if self.is_too_many or (self.is_late and self._late_answer()):
            self.call.take_back_random_numbers()
            ids = ids[:, :-1].contiguous()
        if self.streamer is not None:
            for tokens in ids[:, self.streamed :].cpu().unbind(1):
                self._stream(tokens)
            with runs(None):
                self.streamer.end()
        return ids

    def _late_answer(self) -> bool:
        self.is_late = False
        self.copied.synchronize()
        return bool(self.ended)

    def _copy(self, to: Any, values: Any) -> None:
        import torch

        with torch.cuda.device(self.call.device):  # whose stream the event is recorded on
            to.copy_(values, non_blocking=True)
            self.copied.record()

    def _stream(self, tokens: Any) -> None:
        self.streamed += 1
        with runs(None):  # the streamer's queue may call generate
            self.streamer.put(tokens)


@contextmanager
def streaming(call: Call) -> Iterator[None]:
    """In this context the streamer, which may raise, gets a token after another step has begun."""
    try:
        yield
    except BaseException:
        call.take_back_random_numbers()
        raise


def _can_allocate(device: Any) -> bool:
    """Whether page-locked memory can be allocated as ``DeferredStopCheck`` does."""
    import torch

    try:
        torch.zeros((), pin_memory=device.type == "cuda")
    except RuntimeError:  # another default device, or no memory
        return False
    return True
