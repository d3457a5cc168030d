"""Captures a round of decoding with drafts: the drafts of a drafter, and their check by the model.

transformers' own loop accepts and rejects.  In the place of the model it gets a `Drafting`, which
runs each check as one step with a fixed number of rows: what a shorter check lacks is filled, and
not counted.  The drafts of a round are another step.  Both read the cache in place, with masks that
are made in the step, from the number of tokens (``rollback.py``).

A drafter's drafts decide how many tokens a round gives, and with ``do_sample`` which random numbers
are drawn, but not how likely a token is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...model.caches import cache_name
from ..kernels.watch import is_upstreams
from .decoding import Decoder, Forward
from .drafts import Drafts
from .graph import NotCaptured
from .rollback import RollbackCache, last_of_each_kind, masks, rows_of
from .snapshot import OwnHook

#: The inputs of a check that say nothing new: its tokens follow all others, and are text.
_KNOWN = frozenset(
    {
        "input_ids", "position_ids", "attention_mask", "cache_position", "use_cache", "return_dict",
        "logits_to_keep", "mm_token_type_ids", "token_type_ids", "image_position_ids",
        "video_position_ids", "num_frames_per_video", "input_features_mask", "output_hidden_states",
        "return_shared_kv_states",
    }
)  # fmt: skip
#: makes the context of checks, in releases whose loop switches experts for them
_FOR_DECODE = "_optimize_model_for_decode"
_GENERATOR = "SinglePositionMultiTokenCandidateGenerator"


class Drafting:
    """Stands in for the model during one call of ``_assisted_decoding``.

    Args:
        model: the model that checks drafts.
        cache: an empty cache.
        drafts: the largest number of drafts in a round.
        drafter: a ``Gemma4AssistantForCausalLM``, or ``None`` if the drafts come from elsewhere.
        warn: is called with the reason why steps are not captured.
        for_decode: is closed after the call; ``None`` if transformers does not choose another
            implementation of experts for the checks.
        only_transformers: whether no other code runs between two rounds.
        checks_ahead: whether a check may begin before transformers asks for it, which no code of a
            user notices.  The cache then needs room for two checks.
    """

    def __init__(
        self,
        model: Any,
        cache: RollbackCache,
        drafts: int,
        drafter: Any,
        warn: Callable[[str], Any],
        for_decode: ExitStack | None,
        only_transformers: bool,
        checks_ahead: bool,
    ) -> None:
        self.model, self.drafts, self.drafter = model, drafts, drafter
        self._cache = cache
        self._decoder = Decoder(model, warn, drafter, only_transformers)
        self._in_order = False  # whether the prompt has all tokens, at the usual positions
        self._for_decode = for_decode
        self._checks_ahead = checks_ahead
        self._drafts: Drafts | None = None  # those that may begin before transformers asks
        self._begun: tuple[Any, Any, Any] | None = None  # a check: tokens, start and outputs

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        if name == _FOR_DECODE:
            return nullcontext  # has begun after the prompt
        return partial(self._generator, value) if name == "_get_candidate_generator" else value

    def _generator(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        if type(generator).__name__ != _GENERATOR:
            return generator
        drafts = Drafts(generator, self)
        # else the next token is not the likeliest
        if not kwargs["generation_config"].do_sample and not kwargs["logits_processor"]:
            self._drafts = drafts
        self._checks_ahead &= is_upstreams(generator.update_candidate_strategy)
        return drafts

    def __call__(self, **inputs: Any) -> Any:
        ids, is_prompt = inputs.get("input_ids"), not self._cache.tokens
        if is_prompt:
            self._in_order = _is_in_order(inputs)
        elif self._decoder.obstacle is None and ids is not None and ids.shape[1] <= self.drafts + 1:
            why = self._why_not(inputs)
            if why is None:
                return self._checked(inputs)
            self._decoder.give_up(NotCaptured(why))
        outputs = self._eager(inputs)
        if is_prompt and self._for_decode is not None:
            # transformers would visit all modules twice in each round
            self._for_decode.enter_context(getattr(self.model, _FOR_DECODE)())
        return outputs

    def _eager(self, inputs: dict[str, Any]) -> Any:
        if self._drafts is not None:
            self._drafts.wait()
        if not inputs.pop("output_hidden_states", False):
            return self.model(**inputs)
        # transformers would keep the states of all tokens and layers
        with _last_hidden_state(self.model) as states:
            outputs = self.model(**inputs)
        outputs.hidden_states = (states.pop(),)
        return outputs

    def _usual(self, inputs: dict[str, Any], start: int) -> Any:
        """A check as transformers runs it; it may run again."""
        self._cache.count(start, start)
        return self._eager({**inputs})

    def _why_not(self, inputs: dict[str, Any]) -> str | None:
        """The reason why a check is not captured; ``None`` if it is."""
        mask = inputs.get("attention_mask")
        length = self._cache.tokens + inputs["input_ids"].shape[1]
        unknown = {name for name, value in inputs.items() if value is not None} - _KNOWN
        unknown.discard(cache_name())
        if unknown:
            return f"its forward is called with {', '.join(sorted(unknown))}"
        if inputs.get(cache_name()) is not self._cache:
            return "its cache was replaced"
        if not self._in_order or (mask is not None and mask.shape != (1, length)):
            return "its prompt is masked, or has other positions than usual"
        return None

    def _checked(self, inputs: dict[str, Any]) -> Any:
        """The model's outputs for these tokens, which the cache then has."""
        cache, count = self._cache, inputs["input_ids"].shape[1]
        rows = self.drafts + 1 if count > 1 else 1
        filled = torch.nn.functional.pad(inputs["input_ids"], (0, rows - count))
        start = cache.tokens
        outputs = self._of_begun(inputs["input_ids"], start)
        if outputs is None:
            usual = partial(self._usual, inputs, start)
            outputs = self.run(self._check, True, usual, agrees=_agree, input_ids=filled)
        if not isinstance(outputs.hidden_states, torch.Tensor):
            return outputs  # as transformers computes them
        cache.count(start + count, start + rows)
        if self._drafts is not None:
            self._drafts.begin(filled[:, 1:count], start, outputs)
        outputs.logits = outputs.logits[:, :count]
        outputs.hidden_states = (outputs.hidden_states,)
        return outputs

    def begin(self, ids: Any, start: Any) -> Sequence[Any]:
        """Begin the check of these tokens, shape ``(1, drafts + 1)``, after ``start`` others.

        Return the tensors that it writes.
        """
        if not self._checks_ahead:
            return ()
        outputs = self.run(self._check, True, None, start, input_ids=ids)
        if outputs is None:
            return ()
        self._begun = ids, start, outputs
        tokens = self._cache.tokens  # the last check's, so this one starts before them
        self._cache.count(tokens, tokens + self.drafts + 1)
        return outputs.logits, outputs.hidden_states

    def _of_begun(self, ids: Any, start: int) -> Any:
        """The outputs of the check that has begun, if it is that of these tokens."""
        begun, self._begun = self._begun, None
        count = ids.shape[1]
        if begun is None or self._drafts is None or count == 1:  # one token has other kernels
            return None
        begun_ids, begun_start, outputs = begun
        given = torch.cat([ids[0], torch.full((1,), start, device=ids.device)])
        if not torch.equal(given, torch.cat([begun_ids[0, :count], begun_start])):
            return None
        self._drafts.wait()
        return outputs

    def end(self) -> None:
        """Wait for what nobody has asked for: the memory that it uses may be freed or lent now."""
        if self._drafts is not None:
            self._drafts.end()
        if self._decoder.state is not None:  # after an error, a check may still run
            torch.cuda.current_stream(self._decoder.state.device).synchronize()
        self._drafts = self._begun = None  # they hold the cache

    @property
    def tokens(self) -> int:
        """The number of tokens in the cache."""
        return self._cache.tokens

    @property
    def is_captured(self) -> bool:
        """Whether the rounds are captured, as far as is known now."""
        return self._in_order and self._decoder.obstacle is None

    def complete(self, outputs: Any) -> None:
        """Add to outputs of a check what transformers' generator reads."""
        if outputs is not None and outputs.get("shared_kv_states") is None:
            layers = last_of_each_kind(self._cache)
            outputs.shared_kv_states = {name: layer.in_order() for name, layer in layers.items()}

    def run(
        self,
        function: Callable[..., Any],
        has_layers: bool,
        usual: Callable[[], Any] | None,
        start: Any = None,
        agrees: Callable[[Any, Any, Any], bool] | None = None,
        **inputs: Any,
    ) -> Any:
        """Run a step that also gets the number of tokens in the cache, and the cache.

        Without ``usual``, return ``None`` if it cannot be replayed.
        """
        if usual is not None and self._drafts is not None:
            self._drafts.wait()
        if start is None:
            ids = inputs["input_ids"]
            start = torch.full((1,), self._cache.tokens, dtype=torch.long, device=ids.device)
        inputs["start"] = start
        names, optional = tuple(inputs), usual is None
        forward = Forward(function, names, True, has_layers, usual, agrees, optional)
        return self._decoder.run(forward, {**inputs, cache_name(): self._cache})

    def _check(self, input_ids: Any, start: Any, **cache: Any) -> Any:
        positions = start + torch.arange(input_ids.shape[1], device=start.device)
        rows = rows_of(self._cache, positions)
        seen = masks(self._cache, positions, positions[-1:] + 1)
        with self._cache.in_place(rows), _last_hidden_state(self.model) as states:
            outputs = self.model(
                input_ids=input_ids,
                position_ids=positions[None],
                attention_mask=seen,
                use_cache=True,
                return_dict=True,
                **cache,
            )
        outputs.hidden_states = states.pop()
        return outputs


@contextmanager
def _last_hidden_state(model: Any) -> Iterator[list[Any]]:
    """In this context, collect what this thread's forwards give the output embeddings."""
    hooks, hook = model.get_output_embeddings()._forward_pre_hooks, OwnHook()
    hooks[hook] = hook  # registering it with PyTorch would look like a change of the model
    try:
        yield hook.inputs
    finally:
        hooks.pop(hook, None)


def _agree(own: Any, usual: Any, other: Any) -> bool:
    """Whether a check has transformers' logits, but for the rounding of kernels.

    ``other`` has the same logits with another kernel for attention.  Its next tokens are the same,
    too, unless two tokens are as near to each other as this rounding.
    """
    right = usual.logits
    found = own.logits[:, : right.shape[1]]
    rounding = 8 * torch.finfo(right.dtype).eps * right.abs().max()
    return bool((found - right).abs().max() <= rounding + 4 * (other.logits - right).abs().max())


def _is_in_order(inputs: dict[str, Any]) -> bool:
    """Whether a prompt has no masked tokens, and positions from 0 on."""
    ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    if ids is None:
        return False
    usual = torch.arange(ids.shape[1], device=ids.device)[None]
    if mask is not None and (mask.shape != ids.shape or not mask.all()):
        return False
    return positions is None or torch.equal(positions, usual)
