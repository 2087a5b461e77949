"""The keys and values of a shrinking batch: preallocated, filled from shared prompts, compacted as rows finish.

Prompts are aligned at their right ends, so in each decoding step every row writes the same column. A prompt that
several rows share is computed once and copied to each of them.

Invariant: columns before a row's first token hold zeros and are masked, so they cannot affect the row's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class PromptPlacement:
    """The first `length` tokens of prefill row `prompts_F[f]` become the prompt of cache row `rows_F[f]`."""

    rows_F: Tensor
    prompts_F: Tensor
    length: int


@dataclass(slots=True)
class CacheSlots:
    """State shared by all layers. `rows` are in use, `columns` are filled, and the first `start` columns hold
    prompts."""

    rows: int
    start: int
    capacity: int
    columns: int
    placements: Sequence[PromptPlacement] | None = None


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer: keys and values [rows, heads, capacity, head width]."""

    def __init__(self, slots: CacheSlots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._buffer(states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """In a prefill, copy the prompts to their rows and attend only to the prompts. Otherwise append one column."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        if slots.placements is not None:
            for place in slots.placements:
                columns = slice(slots.start - place.length, slots.start)
                self.keys[place.rows_F, :, columns] = key_states[place.prompts_F, :, : place.length]
                self.values[place.rows_F, :, columns] = value_states[place.prompts_F, :, : place.length]
            return key_states, value_states
        end = slots.columns + key_states.shape[2]
        self.keys[: slots.rows, :, slots.columns : end] = key_states
        self.values[: slots.rows, :, slots.columns : end] = value_states
        return self.keys[: slots.rows, :, :end], self.values[: slots.rows, :, :end]

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        for buffer in (self.keys, self.values):
            filled = buffer[:, :, : self._slots.columns]
            filled[targets_M] = filled[sources_M]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._slots.placements is not None else self._slots.columns

    def get_max_length(self) -> int:
        return self._slots.capacity

    def _buffer(self, states: Tensor) -> Tensor:
        slots = self._slots
        buffer = states.new_empty(slots.rows, states.shape[1], slots.capacity, states.shape[3])
        # Masked columns are still multiplied: a NaN in uninitialized memory would survive a weight of 0.
        buffer[:, :, : slots.start] = 0
        return buffer


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache for `rows` rows whose prompts, without their last tokens, fit in `start` columns."""

    def __init__(self, rows: int, start: int, capacity: int) -> None:
        self.slots = CacheSlots(rows=rows, start=start, capacity=capacity, columns=start)
        super().__init__(layer_class_to_replicate=partial(RowLayer, self.slots))

    def advance(self) -> None:
        """Count the column that the last forward pass wrote."""
        self.slots.columns += 1

    def compact(self, sources_M: Tensor, targets_M: Tensor, rows: int) -> None:
        """Move row `sources_M[m]` to the place of row `targets_M[m]`, then keep only the first `rows` rows."""
        for layer in self.layers:
            layer.move(sources_M, targets_M)
        self.slots.rows = rows
