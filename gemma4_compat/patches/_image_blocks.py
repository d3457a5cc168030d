"""Masks for sliding layers that let the tokens of one image attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def block_ids(token_types: Any) -> Any:
    """For each token the index of its image or video, -1 outside: int64 [batch, length].

    ``token_types``, [batch, length], is 1 in images and 2 in videos.
    """
    import torch

    is_vision = (token_types == 1) | (token_types == 2)
    starts = is_vision.clone()
    starts[:, 1:] &= ~is_vision[:, :-1]
    return torch.where(is_vision, torch.cumsum(starts.int(), dim=1) - 1, -1)


def within_block_and_window(blocks: Any, window: int) -> Callable[..., Any]:
    """A mask function that is true if both tokens are in one block and within the window.

    Positions after the end of ``blocks``, as in a static cache, are in no block.
    """
    import torch

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        last = blocks.shape[-1] - 1
        of_query = torch.where(query <= last, blocks[batch, query.clamp(max=last)], -1)
        of_key = torch.where(key <= last, blocks[batch, key.clamp(max=last)], -1)
        return (of_query == of_key) & (of_query >= 0) & (key > query - window)

    return mask


def has_bidirectional_images(config: Any, types: Any) -> bool:
    """Whether the tokens of an image or video attend in both directions."""
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) != "vision":
        return False
    return bool(((types == 1) | (types == 2)).any())
