"""Finds the token ids of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..errors import ModelError
from ..runtime.host.onloading import hook_of_weight

#: About how many elements of the embedding weight are hashed at a time.
_ELEMENTS = 16 * 2**20

#: The text model that is called with virtual tokens, and the tokens that stand for them.
VIRTUAL: ContextVar[tuple[Any, list[int]] | None] = ContextVar("VIRTUAL", default=None)


def virtual_tokens(model: Any) -> list[int]:
    """The tokens that stand for the virtual tokens at the beginning of this model's input."""
    called, tokens = VIRTUAL.get() or (None, [])
    return tokens if called is model else []


def token_ids(model: Any, inputs_embeds: Any) -> Any:
    """The token ids of these embeddings: int64, batch x length, on the device of the embeddings.

    Args:
        model: a text model with per-layer embeddings.
        inputs_embeds: batch x length x hidden size, in any floating-point dtype.

    Raises:
        ModelError: an embedding belongs to no token, or to several tokens with different
            per-layer embeddings.
    """
    import torch

    virtual = virtual_tokens(model)
    beginning = torch.tensor(virtual, dtype=torch.long, device=inputs_embeds.device)
    rest = _search_all(model, inputs_embeds[:, len(virtual) :])
    return torch.cat([beginning.expand(len(rest), -1), rest], dim=1)


def _search_all(model: Any, inputs_embeds: Any) -> Any:
    import torch

    with torch.no_grad():
        embeds = inputs_embeds.detach().reshape(-1, inputs_embeds.shape[-1])
        ids = torch.full(embeds.shape[:1], -1, dtype=torch.long, device=embeds.device)
        for find in (_embedded_tokens, _pad_token, _scaled_tokens):
            missing = (ids < 0).nonzero().flatten()
            if missing.numel():
                ids[missing] = find(model, embeds[missing])
        count = int((ids < 0).sum())
    if count:
        raise ModelError(
            f"{count} of {ids.numel()} embeddings in `inputs_embeds` belong to no token: "
            "they do not exactly match the embedding weights.  This model looks up per-layer "
            "embeddings by token id.  Pass `input_ids` instead of `inputs_embeds`, or pass "
            "`per_layer_inputs` as well."
        )
    return ids.view(inputs_embeds.shape[:-1])


def _embedded_tokens(model: Any, embeds: Any) -> Any:
    """The ids of the tokens for which the embedding layer returns these values."""
    # Without the user's hooks, as upstream reads the weight.
    return _search(model, embeds, model.embed_tokens.forward)


def _pad_token(model: Any, embeds: Any) -> Any:
    """The pad token for its unscaled row, which Gemma 4 uses in place of images and audio."""
    import torch

    pad = model.config.pad_token_id
    if pad is None:
        return -1
    is_pad = (embeds == _weight(model)[pad].to(embeds.device)).all(-1)
    return torch.where(is_pad, pad, -1)


def _scaled_tokens(model: Any, embeds: Any) -> Any:
    """The ids of the tokens whose rows give these values with transformers' unrounded factor."""
    weight, factor = _weight(model), model.config.hidden_size**0.5
    return _search(model, embeds, lambda ids: weight[ids.to(weight.device)].to(ids.device) * factor)


def _search(model: Any, embeds: Any, embed: Callable[[Any], Any]) -> Any:
    """The ids of the tokens that ``embed`` turns into these embeddings; -1 if there is none."""
    import torch

    size, width = model.embed_tokens.weight.shape[0], embeds.shape[1]
    dtype = torch.promote_types(embeds.dtype, model.embed_tokens.weight.dtype)
    embeds = embeds.to(dtype)

    def rows(ids: Any) -> Any:
        return embed(ids).to(embeds.device, dtype)

    hashes, inverse = torch.unique(_hash(embeds), return_inverse=True)
    first = torch.full_like(hashes, size)
    for tokens in torch.arange(size, device=embeds.device).split(max(_ELEMENTS // width, 1)):
        own = _hash(rows(tokens))
        indices = torch.searchsorted(hashes, own).clamp(max=len(hashes) - 1)
        found = hashes[indices] == own
        tokens, indices = tokens[found], indices[found]
        first.scatter_reduce_(0, indices, tokens, "amin")
        again = tokens != first[indices]
        if again.any():
            _check_alike(model, tokens[again], first[indices[again]])
    ids = first[inverse]
    is_equal = (rows(ids.clamp(max=size - 1)) == embeds).all(-1) & (ids < size)
    return torch.where(is_equal, ids, -1)


def _check_alike(model: Any, tokens: Any, others: Any) -> None:
    """Raise ``ModelError`` if tokens with equal embeddings differ in per-layer embeddings."""
    per_layer = model.embed_tokens_per_layer.forward
    differ = (per_layer(tokens) != per_layer(others)).any(-1).nonzero().flatten()
    if differ.numel():
        one, other = int(others[differ[0]]), int(tokens[differ[0]])
        raise ModelError(
            f"`inputs_embeds` has an embedding that tokens {one} and {other} share, but their "
            "per-layer embeddings differ.  Pass `input_ids` instead of `inputs_embeds`, or pass "
            "`per_layer_inputs` as well."
        )


def _hash(rows: Any) -> Any:
    """An int64 hash for each row; equal rows have equal hashes."""
    import torch

    rows = (rows + 0.0).contiguous()  # -0.0 is equal to 0.0
    width = rows.shape[-1] * rows.element_size()
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8)
    values = rows.view(next(dtype for dtype in integers if width % dtype.itemsize == 0)).long()
    values = values ^ (values >> 29)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, values.shape[-1:], generator=generator) * 2 + 1
    return (values * factors.to(values.device)).sum(-1)


def _weight(model: Any) -> Any:
    """The weight of the token embeddings; if it is offloaded, the weight that its hook stores."""
    hook = hook_of_weight(model.embed_tokens)
    return model.embed_tokens.weight if hook is None else hook.weights_map["weight"]
