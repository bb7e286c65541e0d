"""Keys and values of rows of any lengths, each from slot 0 on: a transformers cache that rows join and leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedCache(Cache):
    """A cache of up to ``rows`` rows and ``width`` tokens: ``RaggedCache(layers, rows, width, dtype)``.

    Some rows are given whole sequences (``begin``); or rows side by side get one token each, behind those that they
    have (``advance``).
    """

    def __init__(self, layers: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self.rows, self.width, self.dtype = rows, width, dtype
        self.given: tuple[Tensor, Tensor] | None = None  # while sequences come: the rows, and which sequence each takes
        self.at = torch.zeros(0, dtype=torch.int64)  # while tokens come: the slot of each row's
        self.used = 0  # slots that a token looks at
        self.first = 0  # the first of the rows that get one
        self.own = [_Layer(self) for _ in range(layers)]
        super().__init__(layers=list(self.own))

    def begin(self, into: Tensor, source: Tensor) -> None:
        """The next pass holds whole sequences; row ``into[i]`` takes number ``source[i]``."""
        self.given = into, source

    def advance(self, at: Tensor, used: int, first: int = 0) -> None:
        """The next pass holds a token of each of ``len(at)`` rows from ``first`` on, at slot ``at[i]``, all below
        ``used``."""
        self.given, self.at, self.used, self.first = None, at, used, first

    def move(self, row: int, to: int, used: int) -> None:
        """Put the first ``used`` tokens of a row where another row was."""
        for layer in self.own:
            for whole in (layer.keys, layer.values):
                whole[to, :, :used] = whole[row, :, :used]

    def swap(self, row: int, other: int, used: int) -> None:
        """Have two rows change places, each with its first ``used`` tokens."""
        for layer in self.own:
            for whole in (layer.keys, layer.values):
                whole[[row, other], :, :used] = whole[[other, row], :, :used]

    def grow(self, rows: int, width: int, used: int) -> None:
        """Have room for so many rows and tokens; the first ``used`` tokens of all rows stay."""
        before, self.rows, self.width = min(rows, self.rows), rows, width
        for layer in self.own:
            if layer.is_initialized:
                layer.keys, layer.values = (_grown(w, rows, width, before, used) for w in (layer.keys, layer.values))


def _grown(whole: Tensor, rows: int, width: int, before: int, used: int) -> Tensor:
    room = whole.new_zeros(rows, whole.shape[1], width, whole.shape[3])
    room[:before, :, :used] = whole[:before, :, :used]
    return room


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, width, head size] each."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        cache = self.cache

        def room(like: Tensor) -> Tensor:
            shape = (cache.rows, like.shape[1], cache.width, like.shape[3])
            return torch.zeros(shape, dtype=cache.dtype, device=like.device)  # what is masked must be finite

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if cache.given is not None:
            (into, source), length = cache.given, key_states.shape[2]
            self.keys[into, :, :length] = key_states.index_select(0, source).to(cache.dtype)
            self.values[into, :, :length] = value_states.index_select(0, source).to(cache.dtype)
            return key_states, value_states
        first, end = cache.first, cache.first + len(cache.at)
        rows = torch.arange(first, end, device=cache.at.device)
        self.keys[rows, :, cache.at] = key_states[:, :, 0].to(cache.dtype)
        self.values[rows, :, cache.at] = value_states[:, :, 0].to(cache.dtype)
        return self.keys[first:end, :, : cache.used], self.values[first:end, :, : cache.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.cache.given is not None else self.cache.used - 1

    def get_max_length(self) -> int:
        return self.cache.width

    get_max_cache_shape = get_max_length  # its name in earlier releases of transformers
