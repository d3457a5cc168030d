"""A call of ``_sample``, in which a step begins before it is known whether the text has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import conditions
from .between_steps import only_transformers_runs
from .decoding import Decoder, harmless, seen_obstacle
from .graph import NotCaptured

_thread = threading.local()  # .call: the call of ``_sample`` that this thread runs


def running() -> Call | None:
    return getattr(_thread, "call", None)


@contextmanager
def runs(call: Call) -> Iterator[None]:
    """In this context, ``running`` returns this call."""
    import torch

    outer, _thread.call = running(), call
    try:
        yield
    finally:
        _thread.call = outer
        if call.defers:  # the memory of a step too many may be freed or lent now
            torch.cuda.current_stream(call.device).synchronize()


class Call:
    """A call of ``_sample``."""

    def __init__(self, model: Any, arguments: dict[str, Any], of_generate: bool) -> None:
        self.model, self.arguments = model, arguments
        self.of_generate = of_generate  # else its caller has the cache, which has a token too many
        self.decoder: Decoder | None = None
        self.defers = False  # whether a step may begin before it is known that it is needed
        self.random: list[Any] = []  # the states of the generator after the last two steps

    @property
    def device(self) -> Any:
        return self.arguments["input_ids"].device

    def allows_another_step(self) -> bool:
        """Whether nobody notices a step too many."""
        import torch

        if self.decoder is None or self.decoder.obstacle:
            return False
        if not self.of_generate or self.device.type not in conditions.CAPTURED_ON:
            return False
        try:
            conditions.check_process()
            allowed = not seen_obstacle(self.model) and only_transformers_runs(
                self.model, self.arguments, ahead=True
            )
            if allowed:  # as ``DeferredStopCheck`` does: there may be no page-locked memory
                torch.zeros((), pin_memory=self.device.type == "cuda")
        except (NotCaptured, RuntimeError):
            return False
        return allowed

    def step_is_known(self) -> bool:
        """Whether the last step was replayed, and no code of the user made its inputs."""
        return self.decoder is not None and self.decoder.replayed and self.decoder.is_known

    def note_random_numbers(self) -> None:
        """Note which random numbers the steps have taken so far."""
        import torch

        if self.arguments["generation_config"].do_sample:
            self.random = [*self.random[-1:], torch.cuda.get_rng_state(self.device)]

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
