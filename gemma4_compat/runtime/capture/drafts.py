"""The drafts of a ``gemma4_assistant``, which begin before transformers asks for them.

While a check runs, transformers' loop waits for its tokens; and the GPU would wait for Python until
the next drafts and their check begin.  So both are launched right after a check, on a stream of
their own: the GPU itself sees which drafts are right.  Python counts tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from .decoding import harmless
from .graph import stream_for
from .rollback import last_of_each_kind, masks


class Drafts:
    """Stands in for transformers' generator of the drafts of a ``gemma4_assistant``.

    Args:
        generator: transformers' own.
        drafting: the ``Drafting`` of the call.
    """

    def __init__(self, generator: Any, drafting: Any) -> None:
        self._generator, self._drafting = generator, drafting
        self._after_prompt = True
        ends = getattr(generator, "eos_token_id", None)
        self._ends = () if ends is None else ends.tolist()
        self._begun: dict[str, Any] | None = None  # drafts that the GPU computes
        self._device: Any = None  # where some have begun
        self._ready: Any = None  # the event that they are computed
        self._start: Any = None  # the number of tokens before them, on the CPU, and its event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def begin(self, drafts: Any, start: int, outputs: Any) -> None:
        """Begin what follows a check: the drafts after the tokens that it accepts, and their check.

        Args:
            drafts: those of the check, shape ``(1, drafts)``.
            start: the number of tokens before it.
            outputs: of the check.
        """
        self._device, self._ready, self._begun = drafts.device, None, None
        stream, own = torch.cuda.current_stream(self._device), stream_for("drafts", self._device)
        own.wait_stream(stream)
        _share((drafts, outputs.logits, outputs.hidden_states), own)
        # For lack of memory, such as page-locked memory, they are made when transformers asks.
        with torch.cuda.stream(own), harmless("drafts do not begin ahead"):
            # As transformers chooses them: a check that begins after too few tokens would write
            # over the keys and values of the others.
            tokens = outputs.logits.to(torch.float32).argmax(dim=-1)
            is_right = drafts == tokens[:, : drafts.shape[1]]
            number = is_right.long().cumprod(dim=-1).sum(dim=-1)
            next_start, last = number + start + 1, tokens.index_select(1, number)
            self._start = next_start.to("cpu", non_blocking=True), own.record_event()
            hidden = outputs.hidden_states.index_select(1, number)
            given = {"input_ids": last, "hidden": hidden, "size": self._drafting.drafts}
            begun = self._drafting.run(self._draft, False, None, next_start, **given)
            if begun is None:
                return
            ids = torch.cat([last, begun["tokens"]], dim=1)
            _share((*begun.values(), ids, next_start), stream)
            self._begun, self._ready = begun, own.record_event()
            _share(self._drafting.begin(ids, next_start), stream)

    def wait(self, for_check: bool = True) -> None:
        """Let the current stream wait for the drafts that have begun, and for their check."""
        if self._device is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if for_check:
            stream.wait_stream(stream_for("drafts", self._device))
        elif self._ready is not None:
            stream.wait_event(self._ready)

    def end(self) -> None:
        """Wait on the CPU for all that has begun."""
        if self._device is not None:
            stream_for("drafts", self._device).synchronize()

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
            self.wait()
            drafting.complete(model_outputs)
            given = {"model_outputs": model_outputs, "n_last_matches": n_last_matches, **kw}
            return generator.get_candidates(
                input_ids, is_first_iteration=is_first_iteration, **given
            )

        if is_first_iteration or most <= 0 or not drafting.is_captured:
            return usual()
        drafts = self._of_begun()
        if drafts is None:
            last = -1 if self._after_prompt else int(n_last_matches)
            hidden = model_outputs.hidden_states[-1][:, last:][:, :1]
            inputs = {"input_ids": input_ids[:, -1:], "hidden": hidden, "size": drafting.drafts}
            drafts = drafting.run(self._draft, False, usual, **inputs)
        self.wait(for_check=False)
        self._after_prompt = generator.is_main_model_prefill = False
        if not isinstance(drafts, dict):
            return drafts  # as transformers makes them
        # Before transformers 5.17, what follows an accepted end of the text would be accepted, too.
        if self._ends:
            most = until_end(drafts["tokens"][0, :most], self._ends)
        ids = torch.cat([input_ids, drafts["tokens"][:, :most]], dim=1)
        return ids, drafts["logits"][:, :most]

    def _of_begun(self) -> dict[str, Any] | None:
        """The drafts that have begun, if they follow the tokens that transformers accepted."""
        drafts, self._begun = self._begun, None
        if drafts is None:
            return None
        start, known = self._start
        known.synchronize()
        return drafts if int(start) == self._drafting.tokens else None

    def _draft(
        self, input_ids: Any, hidden: Any, size: int, start: Any, **cache: Any
    ) -> dict[str, Any]:
        """The ``size`` drafts of a round; transformers' generator makes them in the same way."""
        [own] = cache.values()
        drafter, embedding = self._drafting.drafter, self._generator.target_model_input_embeddings
        layers = last_of_each_kind(own)
        shared = {name: (layer.keys, layer.values) for name, layer in layers.items()}
        # The drafter's window has one token more, and the drafter's own token has no key.
        seen = masks(own, start - 1, start, extra=1)
        tokens, logits = [], []
        for _ in range(size):
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


def _share(tensors: Iterable[Any], stream: Any) -> None:
    """Keep the memory of these tensors until a stream that did not make them has read them."""
    for each in tensors:
        each.record_stream(stream)


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
