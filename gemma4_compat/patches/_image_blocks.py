"""Which tokens of one image attend to each other in sliding layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def block_ids(token_types: Any) -> Any:
    """The number of the image or video that each token is in, -1 outside: int64 [batch, length]."""
    import torch

    is_vision = (token_types == 1) | (token_types == 2)
    starts = is_vision.clone()
    starts[:, 1:] &= ~is_vision[:, :-1]
    return torch.where(is_vision, torch.cumsum(starts.int(), dim=1) - 1, -1)


def within_block_and_window(blocks: Any, window: int) -> Callable[..., Any]:
    """A mask function: both tokens in one block, and the key not before the query's window.

    What comes after the last of ``blocks``, as in a static cache, is in none.
    """
    import torch

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        last = blocks.shape[-1] - 1
        of_query = torch.where(query <= last, blocks[batch, query.clamp(max=last)], -1)
        of_key = torch.where(key <= last, blocks[batch, key.clamp(max=last)], -1)
        return (of_query == of_key) & (of_query >= 0) & (key > query - window)

    return mask
