"""Captures a round of decoding with drafts: the drafts of a drafter, and their check by the model.

transformers' own loop accepts and rejects.  In the place of the model it gets a `Drafting`, which
runs each check as one step with a fixed number of rows: what a shorter check lacks is filled, and
not counted.  The drafts of a round are another step.  Both read the cache in place, with masks that
are made in the step, from the number of tokens (``rollback.py``).

A drafter's drafts decide how many tokens a round gives, and never which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ...model.caches import cache_name
from .decoding import Decoder, Forward
from .graph import NotCaptured, stream_for
from .rollback import RollbackCache, last_of_each_kind, masks, rows_of

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
    """

    def __init__(
        self,
        model: Any,
        cache: RollbackCache,
        drafts: int,
        drafter: Any,
        warn: Callable[[str], Any],
        for_decode: ExitStack | None,
    ) -> None:
        self.model, self.drafts, self.drafter = model, drafts, drafter
        self._cache = cache
        self._decoder = Decoder(model, warn, drafter)
        self._in_order = False  # whether the prompt has all tokens, at the usual positions
        self._for_decode = for_decode
        self._drafts: _Drafts | None = None  # those that may begin before transformers asks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        if name == _FOR_DECODE:
            return nullcontext  # has begun after the prompt
        return partial(self._generator, value) if name == "_get_candidate_generator" else value

    def _generator(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        if type(generator).__name__ != _GENERATOR:
            return generator
        drafts = _Drafts(generator, self)
        # else the next token is not the likeliest
        if not kwargs["generation_config"].do_sample and not kwargs["logits_processor"]:
            self._drafts = drafts
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
        if not inputs.pop("output_hidden_states", False):
            return self.model(**inputs)
        # transformers would keep the states of all tokens and layers
        with _last_hidden_state(self.model) as states:
            outputs = self.model(**inputs)
        outputs.hidden_states = (states.pop(),)
        return outputs

    def _why_not(self, inputs: dict[str, Any]) -> str | None:
        """The reason why a check is not captured; ``None`` if it is."""
        mask, length = (
            inputs.get("attention_mask"),
            self._cache.tokens + inputs["input_ids"].shape[1],
        )
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
        outputs = self.run(self._check, True, partial(self._eager, inputs), input_ids=filled)
        if not isinstance(outputs.hidden_states, torch.Tensor):
            return outputs  # as transformers computes them
        cache.count(start + count, start + rows)
        if self._drafts is not None:
            self._drafts.begin(filled[:, 1:count], start, outputs)
        outputs.logits = outputs.logits[:, :count]
        outputs.hidden_states = (outputs.hidden_states,)
        return outputs

    def end(self) -> None:
        """Let what follows the call wait for drafts that nobody has asked for."""
        if self._drafts is not None:
            self._drafts.wait()
            self._drafts = None  # both hold the cache

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
        **inputs: Any,
    ) -> Any:
        """Run a step that also gets the number of tokens in the cache, and the cache.

        Without ``usual``, return ``None`` if it cannot be replayed.
        """
        if start is None:
            ids = inputs["input_ids"]
            start = torch.full((1,), self._cache.tokens, dtype=torch.long, device=ids.device)
        inputs["start"] = start
        forward = Forward(function, tuple(inputs), True, has_layers, usual, optional=usual is None)
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


class _Drafts:
    """Stands in for transformers' generator of the drafts of a ``gemma4_assistant``."""

    def __init__(self, generator: Any, drafting: Drafting) -> None:
        self._generator, self._drafting = generator, drafting
        self._after_prompt = True
        ends = getattr(generator, "eos_token_id", None)
        self._ends = () if ends is None else ends.tolist()
        self._begun: dict[str, Any] | None = None  # drafts that the GPU computes
        self._device: Any = None  # where some have begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def begin(self, drafts: Any, start: int, outputs: Any) -> None:
        """Begin the next drafts while transformers reads which drafts a check accepts.

        They are computed beside its small operations.  Wrong ones would only be rejected.

        Args:
            drafts: those of the check, shape ``(1, drafts)``.
            start: the number of tokens before it.
            outputs: of the check.
        """
        self._device = drafts.device
        stream, own = torch.cuda.current_stream(self._device), stream_for("drafts", self._device)
        own.wait_stream(stream)
        with torch.cuda.stream(own), suppress(torch.OutOfMemoryError):
            tokens = outputs.logits.argmax(dim=-1)
            is_right = drafts == tokens[:, : drafts.shape[1]]
            number = is_right.long().cumprod(dim=-1).sum(dim=-1)
            inputs = {
                "input_ids": tokens.index_select(1, number),
                "hidden": outputs.hidden_states.index_select(1, number),
                "start": number + start + 1,
            }
            self._begun = self._drafting.run(self._draft, False, None, **inputs)
            for each in (self._begun or {}).values():
                each.record_stream(stream)

    def wait(self) -> None:
        """Let the current stream wait for the drafts that have begun."""
        if self._device is not None:
            own = stream_for("drafts", self._device)
            torch.cuda.current_stream(self._device).wait_stream(own)

    def get_candidates(
        self,
        input_ids: Any,
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: Any,
        **kw: Any,
    ) -> Any:
        """The tokens with the drafts behind them, and the drafter's logits."""
        generator, drafting = self._generator, self._drafting
        most = min(drafting.drafts, generator.main_model_max_length - input_ids.shape[1] - 1)

        def usual() -> Any:
            drafting.complete(model_outputs)
            given = {"model_outputs": model_outputs, "n_last_matches": n_last_matches, **kw}
            return generator.get_candidates(
                input_ids, is_first_iteration=is_first_iteration, **given
            )

        if is_first_iteration or most <= 0 or not drafting.is_captured:
            return usual()
        drafts, self._begun = self._begun, None
        if drafts is None:
            last = -1 if self._after_prompt else int(n_last_matches)
            hidden = model_outputs.hidden_states[-1][:, last:][:, :1]
            inputs = {"input_ids": input_ids[:, -1:], "hidden": hidden}
            drafts = drafting.run(self._draft, False, usual, **inputs)
        self.wait()
        self._after_prompt = generator.is_main_model_prefill = False
        if not isinstance(drafts, dict):
            return drafts  # as transformers makes them
        # Before transformers 5.17, what follows an accepted end of the text would be accepted, too.
        if self._ends:
            most = until_end(drafts["tokens"][0, :most], self._ends)
        ids = torch.cat([input_ids, drafts["tokens"][:, :most]], dim=1)
        return ids, drafts["logits"][:, :most]

    def _draft(self, input_ids: Any, hidden: Any, start: Any, **cache: Any) -> dict[str, Any]:
        """As many drafts as a round has; transformers' generator makes them in the same way."""
        [own] = cache.values()
        drafter, embedding = self._drafting.drafter, self._generator.target_model_input_embeddings
        layers = last_of_each_kind(own)
        shared = {name: (layer.keys, layer.values) for name, layer in layers.items()}
        # The drafter's window has one token more, and the drafter's own token has no key.
        seen = masks(own, start - 1, start, extra=1)
        tokens, logits = [], []
        for _ in range(self._drafting.drafts):
            embeds = torch.cat([embedding(input_ids), hidden], dim=-1)
            state = drafter.model(
                inputs_embeds=drafter.pre_projection(embeds),
                attention_mask=seen,
                position_ids=start[None],
                shared_kv_states=shared,
                use_cache=False,
            ).last_hidden_state
            logits.append(_logits_of(drafter, state))
            input_ids, hidden = logits[-1].argmax(dim=-1), drafter.post_projection(state)
            tokens.append(input_ids)
        return {"tokens": torch.cat(tokens, dim=1), "logits": torch.cat(logits, dim=1)}


def until_end(tokens: Any, ends: Collection[int]) -> int:
    """The number of tokens up to the first one that ends a text, with that one."""
    found = (number for number, token in enumerate(tokens.tolist(), 1) if token in ends)
    return next(found, len(tokens))


def _logits_of(drafter: Any, state: Any) -> Any:
    """The drafter's logits, as `Gemma4AssistantMaskedEmbedder` makes them, without ``.item()``."""
    weight, embedder = drafter.lm_head.weight, drafter.masked_embedding
    if not drafter.config.use_ordered_embeddings:
        return drafter.lm_head(state)
    best = embedder.centroids(state).topk(embedder.centroid_intermediate_top_k).indices
    ordering = embedder.token_ordering.long().view(embedder.num_centroids, -1)
    tokens = ordering[best].flatten(-2)  # (1, 1, tokens)
    known = torch.nn.functional.linear(state[0], weight[tokens[0, 0]])[None]
    shape = (1, 1, len(weight))
    return (known.amin(-1, keepdim=True) - 1).expand(shape).scatter(-1, tokens, known)


@contextmanager
def _last_hidden_state(model: Any) -> Iterator[list[Any]]:
    """In this context, collect what this thread's forwards give the output embeddings."""
    states: list[Any] = []
    thread = get_ident()

    def note(_: Any, inputs: Any) -> None:
        if get_ident() == thread:
            states.append(inputs[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        yield states
    finally:
        handle.remove()


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
