"""What this machine's matrix products reach: the yardstick of model FLOP utilisation (MFU).

    flops / seconds / (matmul_gflops("float32") * 1e9)

A share of the machine's own measured rate says how much is left to gain, on any machine; a share of a data sheet's
peak would say how good the data sheet is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16"]

# Square matrices: large enough to reach the plateau, small enough that a slow machine does one in well under a second.
CPU_SIZE, GPU_SIZE = 1024, 8192
TRIES = 20
LIMIT_S = 0.6  # for all tries together


def matmul_gflops(dtype: Dtype = "float32", device: str = "cpu") -> float:
    """The best rate of a square matrix product in 10^9 floating-point operations per second (2 n^3 per product).

    Uses torch's threads as they are set; takes about 0.6 s. The best, not the median: other work on the machine can
    only slow a product down.
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
    work()  # the first product pays for threads, kernels and caches
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
    """What returns when the device has done what it was asked for."""
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
