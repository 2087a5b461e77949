"""Weights between two processes on one device: the other one reads and writes the same memory, without a copy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # what the other process imports is small
    from benchmarks.gpu.results import Results
    from benchmarks.gpu.sizes import Sizes

WEIGHTS = 1_500_000_000  # numbers; in bfloat16 as many as those of Qwen2.5-1.5B
LIMIT_S = 100.0


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    context: Any = torch.multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    other = context.Process(target=_doubles, args=(orders, answers), daemon=True)
    other.start()
    answers.get(timeout=LIMIT_S)  # it has imported torch
    weights = torch.ones(WEIGHTS if device.type == "cuda" else 1000, dtype=torch.bfloat16, device=device)
    for turn, name in enumerate(("first", "again"), 1):
        began = time.perf_counter()
        orders.put(weights)
        answers.get(timeout=LIMIT_S)
        seconds = time.perf_counter() - began
        results.figure(f"{name}: {weights.nbytes / 1e9:.2g} GB handed over and doubled", seconds, "s")
        wrong = float((weights != 2**turn).float().mean())
        results.check(f"{name}: share of numbers that the other process did not double", wrong, 0.0)
    orders.put(None)
    other.join(LIMIT_S)


def _doubles(orders: Any, answers: Any) -> None:
    answers.put("ready")
    while (weights := orders.get()) is not None:
        weights.mul_(2)
        if weights.is_cuda:
            torch.cuda.synchronize(weights.device)
        del weights  # the sender keeps the memory until nobody uses it here
        answers.put("done")
