"""Memory of micro-batches: measure what a forward and backward pass takes, and derive a token budget
(training.micro_batch_memory_mb).

The measure is the additional memory of the pass, without the weights' gradients, whose size does not depend on the
micro-batch. On CUDA it is the allocator's peak. CPU allocators report no peak; there it is what autograd saves for the
backward pass, plus one chunk of logits. This depends on the micro-batch only, so a repeated or resumed run learns the
same. (The process's resident size also depends on what malloc keeps.) The measure misses temporaries: 2 to 6 % of the
peak that torch's profiler finds with a vocabulary of 64, up to 20 % with 32,000.

Memory per token may grow with row length (attention), so each length class has its own figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.models.logprobs import DEFAULT_LOGITS_CHUNK

# Classes per doubling of the length: within one class, quadratic attention grows by at most 19 % per token.
CLASSES_PER_DOUBLING = 4
# Copies of the current chunk's logits: the logits and their gradient.
LOGITS_COPIES = 2
FLOAT32_BYTES = 4

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """A micro-batch's longest row in tokens, and its positions with padding, which a budget counts."""

    longest: int
    positions: int


class MemoryMeter(Protocol):
    """Measures one micro-batch; `bytes_taken` is final after both contexts."""

    bytes_taken: int

    def forward(self) -> AbstractContextManager[object]: ...

    def backward(self) -> AbstractContextManager[object]: ...


class UnmeasuredMemory:
    bytes_taken = 0

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self) -> AbstractContextManager[object]:
        return nullcontext()


class SavedTensors:
    """Measures bytes of the distinct storages saved for the backward pass, plus `transient_bytes`. Changes no result.

    One checkpointed layer runs without checkpointing. The backward pass starts by recomputing a layer anyway, so the
    peak is the same, and the measure includes that layer's activations.
    """

    def __init__(self, module: nn.Module, transient_bytes: int) -> None:
        layers = (layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer))
        self._last = next((layer for layer in reversed(list(layers)) if layer.gradient_checkpointing), None)
        self._held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self._transient_bytes = transient_bytes
        self.bytes_taken = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        # Keep the storages until the pass ends: a freed storage's address could be reused.
        storages: dict[int, torch.UntypedStorage] = {}

        def save(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and (address := tensor.untyped_storage().data_ptr()) not in self._held:
                storages[address] = tensor.untyped_storage()
            return tensor.detach()

        if self._last is not None:
            self._last.gradient_checkpointing = False
        try:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            if self._last is not None:
                self._last.gradient_checkpointing = True
        self.bytes_taken = self._transient_bytes + sum(storage.nbytes() for storage in storages.values())

    def backward(self) -> AbstractContextManager[object]:
        return nullcontext()


class AllocatorPeak:
    """Measures the peak of CUDA's allocator, without synchronizing: its counters are on the host."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._device = device
        self._held = 0
        self.bytes_taken = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.bytes_taken = torch.cuda.max_memory_allocated(self._device) - self._held

    @contextmanager
    def backward(self) -> Iterator[None]:
        before = self._gradient_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device) - self._held
        self.bytes_taken = max(self.bytes_taken, peak - (self._gradient_bytes() - before))

    def _gradient_bytes(self) -> int:
        return sum(weight.grad.nbytes for weight in self._weights if weight.grad is not None)


class MicroBatchMemory(Generic[BatchT]):
    """The token budget of a step, learned from earlier steps. `size` gives a micro-batch's size.

    Invariant: a budget depends only on `state` and the batch.
    """

    def __init__(self, limit_bytes: int, most_tokens: int, size: Callable[[BatchT], MicroBatchSize]) -> None:
        self.limit_bytes = limit_bytes
        self.size = size
        self._most_tokens = most_tokens
        self._figures: dict[int, float] = {}  # class of the longest row -> bytes per position

    @property
    def known(self) -> bool:
        """Whether there is a measurement. Before the first one, the budget is one longest row."""
        return bool(self._figures)

    def bytes_per_token(self, longest: int) -> float:
        """The expected bytes per token for a batch whose longest row has `longest` tokens; 0 before any measurement.

        A class without measurements uses the nearest class of longer rows. If there is none, it scales the longest
        measured class as if all its memory grew with the square of the length.
        """
        own = _length_class(longest)
        if not self._figures:
            return 0.0
        if longer := [known for known in self._figures if known >= own]:
            return self._figures[min(longer)]
        known = max(self._figures)
        return float(self._figures[known] * 2.0 ** ((own - known) / CLASSES_PER_DOUBLING))

    def fits(self, longest: int) -> bool:
        """Whether a row of `longest` tokens alone stays within the limit."""
        return longest * self.bytes_per_token(longest) <= self.limit_bytes

    def budget(self, longest: int) -> int:
        """Tokens of a micro-batch, padding included: at most training.micro_batch_tokens, and at least the longest row,
        which is trained even if it exceeds the limit."""
        figure = self.bytes_per_token(longest)
        within = int(self.limit_bytes // figure) if figure else longest
        return min(self._most_tokens, max(longest, within))

    def meter(self, micro_batch: BatchT, module: nn.Module, device: torch.device) -> MemoryMeter:
        if device.type == "cuda":
            return AllocatorPeak(module, device)
        vocabulary = cast(Any, module).get_output_embeddings().weight.shape[0]
        logits = min(DEFAULT_LOGITS_CHUNK, self.size(micro_batch).positions * vocabulary)
        return SavedTensors(module, LOGITS_COPIES * FLOAT32_BYTES * logits)

    def learn(self, taken: Sequence[tuple[MicroBatchSize, int]]) -> float:
        """Learn from the sizes of a step's micro-batches and the bytes they took; returns the bytes per position.

        Ignores micro-batches below half of the largest: in these, fixed costs would dominate.
        """
        largest = max(size.positions for size, _ in taken)
        figure = max(found / size.positions for size, found in taken if 2 * size.positions >= largest)
        own = _length_class(max(size.longest for size, _ in taken))
        before = self._figures.get(own, figure)
        # Increase at once, decrease halfway: padding in one batch may be tokens in the next.
        self._figures[own] = max(figure, (before + figure) / 2)
        return figure

    def state(self) -> dict[str, float]:
        return {str(number): figure for number, figure in sorted(self._figures.items())}

    def load_state(self, state: Mapping[str, float]) -> None:
        self._figures = {int(number): float(figure) for number, figure in state.items()}


def _length_class(longest: int) -> int:
    return math.ceil(CLASSES_PER_DOUBLING * math.log2(max(1, longest)))
