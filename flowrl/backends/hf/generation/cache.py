"""Keys and values of the tokens so far, in memory that is laid out once: a transformers cache for full attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Slots(Cache):
    """A cache of ``rows`` rows and ``width`` tokens: ``Slots(layers, rows, width, dtype)``.

    First prompts are put into some rows (``begin``), then one token after the other into all rows (``advance``).
    A row's prompt begins at slot 0; token ``t`` of every response lies at the same slot, behind the longest prompt.
    """

    def __init__(self, layers: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self.rows, self.width, self.dtype = rows, width, dtype
        self.used = 0  # the last slot that holds something
        self.prompts: tuple[slice, Tensor] | None = None  # while prompts come: the rows, and which prompt each takes
        self.own = [_Layer(self) for _ in range(layers)]
        super().__init__(layers=list(self.own))

    def begin(self, into: slice, source: Tensor, length: int) -> None:
        """The next pass holds prompts of up to ``length`` tokens; row ``i`` of ``into`` takes prompt ``source[i]``."""
        self.prompts, self.used = (into, source), max(self.used, length - 1)

    def advance(self, slot: int) -> None:
        """The next forward pass holds a token of every row, which lies at ``slot``."""
        self.prompts, self.used = None, slot

    def keep(self, live: Tensor) -> None:
        """Only these rows, in increasing order, stay. They move up in place: no second copy of the whole is made."""
        self.rows = len(live)
        for layer in self.own:
            layer.keys, layer.values = (_moved_up(whole, live, self.used + 1) for whole in (layer.keys, layer.values))


def _moved_up(whole: Tensor, live: Tensor, used: int) -> Tensor:
    part = whole[: len(live)]
    part[:, :, :used] = whole[:, :, :used].index_select(0, live)
    return part


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, width, head size] each."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots = self.slots

        def room(like: Tensor) -> Tensor:
            shape = (slots.rows, like.shape[1], slots.width, like.shape[3])
            return torch.zeros(shape, dtype=slots.dtype, device=like.device)  # what is masked must be finite

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        slots = self.slots
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if slots.prompts is not None:
            (into, source), length = slots.prompts, key_states.shape[2]
            self.keys[into, :, :length] = key_states.index_select(0, source)
            self.values[into, :, :length] = value_states.index_select(0, source)
            return key_states, value_states
        end = slots.used + 1
        self.keys[:, :, slots.used : end] = key_states
        self.values[:, :, slots.used : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.slots.prompts is not None else self.slots.used

    def get_max_length(self) -> int:
        return self.slots.width

    get_max_cache_shape = get_max_length  # its name in earlier releases of transformers
