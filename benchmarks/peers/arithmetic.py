"""The least arithmetic of a GRPO step, and the rate of this machine, at which a step can take no less time.

    operations = step_operations(ModelSize.of(model), batch, reference=True)
    meter = RateMeter(threads)          # call it between two samples, while both sides wait
    share = operations / (step_s * meter.median * 1e9)

A step needs one forward pass to sample, one for the reference's log-probs if the loss has a KL term, and a forward and
a backward pass to train; a backward pass counts as two forward passes. Counted is what no implementation can leave
out, so the share is that of a bound:

- the matrix products of the layers and of the head, and attention's two products; no softmax, norm, optimizer or grade;
- a prompt once for all of its rollouts; all tokens of a completion but the last one, which is only predicted;
- logits of completion tokens only; a token attends to itself and to what comes before it.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from pvg.bench.workloads.trainer import ModelSize, matmul_gflops
from pvg.training.batch import PolicyBatch

TRAINING = 3  # forward passes that a forward and a backward pass cost


def step_operations(size: ModelSize, batch: PolicyBatch, *, reference: bool) -> float:
    """Floating-point operations that a step on this batch requires; `reference`: with log-probs of a reference."""
    prompts_N, completions_N = batch.prompt_lengths.astype(np.float64), batch.completion_lengths_N.astype(np.float64)
    distinct = {ids[:length].tobytes() for ids, length in zip(batch.sequences, batch.prompt_lengths, strict=True)}
    shared_U = np.array([len(ids) for ids in distinct], np.float64) / batch.sequences[0].itemsize
    inputs_N = completions_N - 1
    tokens = shared_U.sum() + inputs_N.sum()
    # Token t of a sequence, from 1, attends to t tokens.
    attended = (shared_U * (shared_U + 1) / 2).sum() + (inputs_N * prompts_N + inputs_N * (inputs_N + 1) / 2).sum()
    return size.forward(float(tokens), float(completions_N.sum()), float(attended)) * (1 + reference + TRAINING)


class RateMeter:
    """Measures this machine's matmul rate with so many threads, each time that it is called."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._gflops: list[float] = []

    def __call__(self) -> None:
        torch.set_num_threads(self._threads)
        self._gflops.append(matmul_gflops())

    @property
    def median(self) -> float:
        return statistics.median(self._gflops)
