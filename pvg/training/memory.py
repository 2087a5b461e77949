"""What a micro-batch's forward and backward pass take of memory, and the token budget that follows from it
(training.micro_batch_memory_mb).

Measured is what they take above what was held before, but for the weights' gradients: those are as large however small
the micro-batch. On CUDA the allocator tells its peak. No allocator of a CPU does: there it is what autograd saves for
the backward pass, and a chunk of logits. The resident size of the process would be a worse answer, for it depends on
what malloc has kept; this depends on the micro-batch alone, so that a run that is repeated or resumed learns the same.
It misses temporaries: 2 to 6 % of the peak that torch's profiler finds for a vocabulary of 64, up to 20 % for one of
32,000.

Memory per token may grow with the rows' length (attention), so each class of lengths has its own figure.
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

# Classes per doubling of the length: within one, attention that grows with the square takes at most 19 % more a token.
CLASSES_PER_DOUBLING = 4
# Logits, and their gradient, of the chunk that is worked on.
LOGITS_COPIES = 2
FLOAT32_BYTES = 4

BatchT = TypeVar("BatchT")
BatchT_contra = TypeVar("BatchT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Of a micro-batch: its longest row, in tokens, and its positions, padding included, which a budget counts."""

    longest: int
    positions: int


class MemoryMeter(Protocol):
    """Of one micro-batch: `bytes_taken` is known when both contexts were left."""

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
    """Bytes of the distinct storages that are saved for the backward pass, and `transient_bytes`. Changes no number.

    Of checkpointed layers one is computed as if it were not: the backward pass begins by computing it again, so the
    peak is the same, and what that takes is seen.
    """

    def __init__(self, module: nn.Module, transient_bytes: int) -> None:
        layers = (layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer))
        self._last = next((layer for layer in reversed(list(layers)) if layer.gradient_checkpointing), None)
        self._held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self._transient_bytes = transient_bytes
        self.bytes_taken = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        # Kept until the pass is over: the address of a storage that is freed meanwhile would be another's.
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
    """The peak of CUDA's allocator. Asking it waits for nothing: it keeps its books on the host."""

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
    """The token budget of a step, learned from the steps before. `size` measures a micro-batch's rows.

    Invariant: a budget follows from `state` and the batch alone.
    """

    def __init__(
        self, limit_bytes: int, most_tokens: int, logits_chunk: int, size: Callable[[BatchT], MicroBatchSize]
    ) -> None:
        self.limit_bytes = limit_bytes
        self.size = size
        self._most_tokens = most_tokens
        self._logits_chunk = logits_chunk
        self._figures: dict[int, float] = {}  # class of the longest row -> bytes per position

    @property
    def known(self) -> bool:
        """Whether anything was measured yet. Until then, the budget is the longest row alone."""
        return bool(self._figures)

    def bytes_per_token(self, longest: int) -> float:
        """What is reckoned with for a batch whose longest row has so many tokens; 0 before anything is known.

        Of a class that was never measured it is the figure of the nearest class of longer rows. Without one, that of
        the longest, as if all its memory grew with the square of the length.
        """
        own = _length_class(longest)
        if not self._figures:
            return 0.0
        if longer := [known for known in self._figures if known >= own]:
            return self._figures[min(longer)]
        known = max(self._figures)
        return float(self._figures[known] * 2.0 ** ((own - known) / CLASSES_PER_DOUBLING))

    def fits(self, longest: int) -> bool:
        """Whether a row of so many tokens keeps within the limit when it is trained alone."""
        return longest * self.bytes_per_token(longest) <= self.limit_bytes

    def budget(self, longest: int) -> int:
        """Tokens, padding included, of a micro-batch: at least the longest row, which is trained whether it fits or
        not, and at most training.micro_batch_tokens."""
        figure = self.bytes_per_token(longest)
        within = int(self.limit_bytes // figure) if figure else longest
        return min(self._most_tokens, max(longest, within))

    def meter(self, micro_batch: BatchT, module: nn.Module, device: torch.device) -> MemoryMeter:
        if device.type == "cuda":
            return AllocatorPeak(module, device)
        vocabulary = cast(Any, module).get_output_embeddings().weight.shape[0]
        logits = min(self._logits_chunk, self.size(micro_batch).positions * vocabulary)
        return SavedTensors(module, LOGITS_COPIES * FLOAT32_BYTES * logits)

    def learn(self, taken: Sequence[tuple[MicroBatchSize, int]]) -> float:
        """Learn from the size of each micro-batch of a step and the bytes it took; returns the bytes per position.

        Micro-batches below half of the largest do not count: what does not depend on their size weighs too much.
        """
        largest = max(size.positions for size, _ in taken)
        figure = max(found / size.positions for size, found in taken if 2 * size.positions >= largest)
        own = _length_class(max(size.longest for size, _ in taken))
        before = self._figures.get(own, figure)
        # Up at once, down half way: what is padding in one batch is tokens in the next.
        self._figures[own] = max(figure, (before + figure) / 2)
        return figure

    def state(self) -> dict[str, float]:
        return {str(number): figure for number, figure in sorted(self._figures.items())}

    def load_state(self, state: Mapping[str, float]) -> None:
        self._figures = {int(number): float(figure) for number, figure in state.items()}


def _length_class(longest: int) -> int:
    return math.ceil(CLASSES_PER_DOUBLING * math.log2(max(1, longest)))
