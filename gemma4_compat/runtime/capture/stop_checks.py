"""A call of ``_sample``, in which a step begins before it is known whether the text has ended.

It is one file, because a step too many is noticed and undone by what both classes keep.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

from ...model.parts import is_ours
from ..kernels.watch import is_upstreams
from . import conditions
from .between_steps import only_transformers_runs
from .decoding import Decoder, harmless, seen_obstacle

thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


class Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any], of_generate: bool) -> None:
        self.model, self.arguments = model, arguments
        self.of_generate = of_generate  # else its caller has the cache, which has a token too many
        self.decoder: Decoder | None = None
        self.late: LateAnswers | None = None
        self.device: Any = None  # of the steps, and how many sequences they have
        self.sequences = 0
        self.random: list[Any] = []  # the states of the generator after the last two steps

    def allows_another_step(self) -> bool:
        """Whether only functions of transformers run between two steps."""
        import torch
        from transformers.generation import utils

        if (self.decoder is not None and self.decoder.obstacle) or seen_obstacle(self.model):
            return False
        ids = self.arguments["input_ids"]
        if not self.of_generate or ids.device.type not in conditions.CAPTURED_ON:
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

    def end(self) -> None:
        """Wait for a step too many: the memory that it uses may be freed or lent afterwards."""
        import torch

        self.late = None  # which refers to this call, that has the cache
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


class LateAnswers:
    """What ``DeferredStopCheck`` does, for transformers < 5.17.

    The streamer is kept from ``_sample``, which waits for the token that it gives to it.
    """

    def __init__(self, call: Call, streamer: Any) -> None:
        self.call, self.streamer = call, streamer
        self.sequences, self.prompt = call.arguments["input_ids"].shape
        self.length = self.streamed = self.prompt
        self.most = call.arguments["stopping_criteria"].max_length
        self.slots: deque[Any] = deque()  # of two steps: the answer, the tokens, and an event
        self.is_late = False  # whether the answer of the last step is not known yet
        self.too_many = 0

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
        self.call.note(answer.device, self.sequences)
        decoder = self.call.decoder
        if self.is_late:
            ended, tokens, copied = self.slots[1]
            copied.synchronize()
            with streaming(self.call):
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
        thread.call = None  # the streamer's queue may call generate
        self.streamer.put(tokens)
        thread.call = self.call

    def _allocate(self, device: Any) -> bool:
        import torch

        if device.type not in conditions.CAPTURED_ON or not can_allocate(device):
            return False
        pinned = device.type == "cuda"
        for _ in range(2):
            ended = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=pinned)
            tokens = torch.zeros(self.sequences, dtype=torch.long, device="cpu", pin_memory=pinned)
            self.slots.append((ended, tokens, torch.Event(device=device, blocking=True)))
        return True


@contextmanager
def streaming(call: Call) -> Iterator[None]:
    """In this context the streamer, which may raise, gets a token after another step has begun."""
    try:
        yield
    except BaseException:
        call.take_back_random_numbers()
        raise


def running() -> Call | None:
    return getattr(thread, "call", None)


def can_allocate(device: Any) -> bool:
    """Whether page-locked memory can be allocated as ``DeferredStopCheck`` does."""
    import torch

    try:
        torch.zeros((), pin_memory=device.type == "cuda")
    except RuntimeError:  # another default device, or no memory
        return False
    return True
