"""The floating-point operations that a model needs, and the rate of matrix products that this machine reaches.

    size = ModelSize.of(model)
    flops = size.forward(tokens=9472, predicted=6760, attended=350_464.0)
    mfu = flops / seconds / (matmul_gflops("float32") * 1e9)

A forward pass needs 2 N T + 2 H C + 4 l d S operations: T non-padding tokens, C of them with logits, N parameters of
the layers, H of the head, l layers, d = heads x head size, S pairs of a token and a token that it attends to (PaLM,
arXiv 2204.02311, appendix B, which counts the head for all tokens). A backward pass takes twice that.

Model FLOP utilisation (MFU) is relative to the machine's measured rate, which shows how much can still be gained on any
machine. Relative to a data sheet's peak it would also measure how optimistic the data sheet is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from pvg.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of parameters: of the layers (`body`) and of the `head`. `attention`: layers x heads x head size."""

    body: int
    head: int
    attention: int

    @classmethod
    def of(cls, model: LanguageModel) -> ModelSize:
        head = model.module.get_output_embeddings().weight
        table = model.module.get_input_embeddings().weight
        config = model.module.config.get_text_config()
        heads = config.num_attention_heads
        width = int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))
        # A lookup in the embedding table costs nothing. If head and table are tied, count the parameters once.
        body = model.num_parameters - head.numel() - (0 if table is head else table.numel())
        return cls(body, head.numel(), int(config.num_hidden_layers) * width)

    def forward(self, tokens: float, predicted: float, attended: float) -> float:
        """Operations of one forward pass; the module's docstring has the formula."""
        return 2.0 * self.body * tokens + 2.0 * self.head * predicted + 4.0 * self.attention * attended


Dtype = Literal["float32", "bfloat16"]

# Square matrices: large enough to reach the plateau, small enough for well under a second on a slow machine.
CPU_SIZE, GPU_SIZE = 1024, 8192
TRIES = 20
LIMIT_S = 0.6  # for all tries together


def matmul_gflops(dtype: Dtype = "float32", device: str = "cpu") -> float:
    """The best rate of a square matrix product in 10^9 floating-point operations per second (2 n^3 per product).

    Uses torch's current number of threads; takes about 0.6 s. Takes the best try, not the median: other work on the
    machine can only slow a product down.
    """
    import torch

    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    left_NN = torch.randn(size, size, generator=generator).to(device, kind)
    right_NN = torch.randn(size, size, generator=generator).to(device, kind)
    out_NN = torch.empty(size, size, device=device, dtype=kind)
    best = _best_seconds(lambda: torch.mm(left_NN, right_NN, out=out_NN), _waiter(device))
    return 2 * size**3 / best / 1e9


def _best_seconds(work: Callable[[], torch.Tensor], wait: Callable[[], None]) -> float:
    work()  # the first product also starts threads, loads kernels and fills caches
    wait()
    best, began = float("inf"), time.perf_counter()
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        wait()
        now = time.perf_counter()
        best = min(best, now - start)
        if now - began > LIMIT_S:
            break
    return best


def _waiter(device: str) -> Callable[[], None]:
    """A function that blocks until the device has finished its queued work."""
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
