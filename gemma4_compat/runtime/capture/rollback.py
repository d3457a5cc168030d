"""A static cache from which the tokens of rejected drafts are removed.

transformers' static cache keeps the last ``sliding_window`` tokens of a sliding layer in order.  So
an update moves all of them, and drops tokens that are needed again if drafts are rejected.  Here
the rows of a sliding layer are a ring with room for the drafts of one check.  Nothing moves, and
what is removed is overwritten by the next update.

An update returns the keys and values in order, as transformers' dynamic cache does.  In a check,
whose masks say which row holds which token, it returns all rows of the ring (`in_place`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticLayer

from ...errors import ModelError

_ROOM = 16
#: what a layer writes to in a check: the rows of the full layers, and those of the sliding ones
Rows = tuple[torch.Tensor, torch.Tensor]


class RollbackLayer(StaticLayer):  # type: ignore[misc]
    """The keys and values of one layer, of shape ``(1, heads, max_cache_len, head_dim)``.

    Args:
        max_cache_len: the number of rows.
        sliding_window: the tokens that a token of a sliding layer sees; ``None`` for a full layer.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, max_cache_len: int, sliding_window: int | None = None) -> None:
        super().__init__(max_cache_len)
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.cumulative_length_int = 0  # the number of tokens
        self.first_kept_int = 0  # the first token that the rows still hold
        self.rows: Rows | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Write keys and values; return those that the new tokens see, and maybe more.

        Raises:
            ModelError: a full layer has no room for them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = key_states, value_states
        if self.rows is not None:
            return self._written(self.rows[self.is_sliding], states)
        old, new = self.cumulative_length_int, self.cumulative_length_int + key_states.shape[-2]
        if self.sliding_window is None and new > self.max_cache_len:
            raise ModelError(
                f"this cache has room for {self.max_cache_len} tokens, and {new} are needed.  Pass "
                "no cache, or generate with a larger max_cache_len."
            )
        self.count(new, new)
        if self.sliding_window is None:
            self._written(self._rows_of(old, new), states)
            return self.in_order()
        seen = self._tokens(max(old - self.sliding_window + 1, 0), old)
        kept = self._rows_of(max(old, new - self.max_cache_len), new)
        self._written(kept, tuple(each[:, :, -len(kept) :] for each in states))
        return tuple(torch.cat(pair, dim=-2) for pair in zip(seen, states, strict=True))

    def _written(self, rows: torch.Tensor, states: Any) -> tuple[torch.Tensor, torch.Tensor]:
        for own, new in zip((self.keys, self.values), states, strict=True):
            own.index_copy_(2, rows, new)
        return self.keys, self.values

    def _rows_of(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self.keys.device) % self.max_cache_len

    def _tokens(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        rows = self._rows_of(start, end)
        return tuple(each.index_select(2, rows) for each in (self.keys, self.values))

    def in_order(self) -> tuple[torch.Tensor, ...]:
        """The keys and values of all tokens that the next token sees."""
        new = self.cumulative_length_int
        if self.sliding_window is None:
            return self.keys[:, :, :new], self.values[:, :, :new]
        return self._tokens(max(new - self.sliding_window + 1, 0), new)

    def count(self, tokens: int, end: int) -> None:
        """The layer now has so many tokens, and has written to the rows of those before ``end``."""
        self.cumulative_length_int = tokens
        self.first_kept_int = max(self.first_kept_int, end - self.max_cache_len)

    def get_seq_length(self) -> int:
        return self.cumulative_length_int

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that the next update returns, and the first one's position."""
        old, window = self.cumulative_length_int, self.sliding_window
        first = 0 if window is None else max(old - window + 1, 0)
        return old + query_length - first, first

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; if it is positive, all after so many.

        Raises:
            ModelError: tokens that the next token of a sliding layer sees were overwritten.
        """
        left = int(tokens_to_remove)  # transformers may pass a tensor
        if left <= 0:
            left += self.cumulative_length_int
        left = min(left, self.cumulative_length_int)
        seen = 0 if self.sliding_window is None else max(left - self.sliding_window + 1, 0)
        if seen < self.first_kept_int:
            raise ModelError(
                f"{self.cumulative_length_int - left} tokens cannot be removed: this cache no "
                f"longer has the keys and values of the tokens before {self.first_kept_int}.  A "
                "dynamic cache has them (do not pass cache_implementation='static')."
            )
        self.cumulative_length_int = left

    def reset(self) -> None:
        super().reset()
        self.cumulative_length_int = self.first_kept_int = 0


class RollbackCache(StaticCache):  # type: ignore[misc]
    """A static cache for one sequence, from which tokens can be removed."""

    def __init__(self, config: Any, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.longest = max_cache_len
        self._window = config.get_text_config(decoder=True).sliding_window
        self.make_room(_ROOM)

    def make_room(self, room: int) -> None:
        """Let ``room`` tokens be removed at once.  The cache must be empty."""
        length, window = self.longest, self._window
        for index, layer in enumerate(self.layers):
            if isinstance(layer, StaticLayer):  # else a layer that shares keys and values
                sizes = (min(length, window), window) if layer.is_sliding else (length, None)
                self.layers[index] = RollbackLayer(sizes[0] + room, sizes[1])

    @property
    def tokens(self) -> int:
        return max((layer.cumulative_length_int for layer in self.own_layers()), default=0)

    def own_layers(self) -> list[RollbackLayer]:
        """The layers that have keys and values."""
        return [layer for layer in self.layers if isinstance(layer, RollbackLayer)]

    def count(self, tokens: int, end: int) -> None:
        """All layers now have so many tokens, and wrote to the rows of those before ``end``."""
        for layer in self.own_layers():
            layer.count(tokens, end)

    @contextmanager
    def in_place(self, rows: Rows) -> Iterator[None]:
        """In this context, an update writes to these rows and returns all rows."""
        for layer in self.own_layers():
            layer.rows = rows
        try:
            yield
        finally:
            for layer in self.own_layers():
                layer.rows = None


def last_of_each_kind(cache: RollbackCache) -> dict[str, RollbackLayer]:
    """The layers whose keys and values a drafter reads, by the name of their mask."""
    kinds = {False: "full_attention", True: "sliding_attention"}
    return {kinds[layer.is_sliding]: layer for layer in cache.own_layers()}


def rows_of(cache: RollbackCache, positions: torch.Tensor) -> Rows:
    """The rows of tokens at these positions, shape ``(tokens,)``, in full and sliding layers."""
    layers = last_of_each_kind(cache)
    ring = layers.get("sliding_attention")
    return positions, positions if ring is None else positions % ring.max_cache_len


def masks(
    cache: RollbackCache, queries: torch.Tensor, end: torch.Tensor, extra: int = 0
) -> dict[str, torch.Tensor]:
    """The rows that each query sees, in boolean masks of shape ``(1, 1, queries, rows)``.

    Args:
        queries: the positions of the queries.
        end: the position after the last token in the cache.
        extra: how many tokens more than ``sliding_window`` a query of a sliding layer sees.
    """
    made = {}
    for name, layer in last_of_each_kind(cache).items():
        size = layer.max_cache_len
        rows = torch.arange(size, device=queries.device)
        # a ring holds the last token of each row
        held = rows if layer.sliding_window is None else end - 1 - (end - 1 - rows) % size
        seen = (held[None] <= queries[:, None]) & (held < end)
        if layer.sliding_window is not None:
            oldest = queries[:, None] - (layer.sliding_window + extra)
            seen &= (held[None] > oldest) & (held >= 0)
        made[name] = seen[None, None]
    return made
