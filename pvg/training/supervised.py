"""Supervised training: the prover learns to write given solutions, with the forward passes of policy training.

loss = - mean of log pi(token) over the tokens of the batch's solutions, in nats
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pvg.config.training import Training
from pvg.records import Float32, Int32, Role
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, batch_logprobs, forward_batches, recompute_logprobs


def demonstration_batch(prompts: Sequence[Int32], solutions: Sequence[Int32], roles: Sequence[Role]) -> PolicyBatch:
    """N solutions with their prompts as a batch: no policy sampled them, so their log-probs and advantages are 0."""
    count = len(prompts)
    return PolicyBatch(
        sequences=[np.concatenate(pair) for pair in zip(prompts, solutions, strict=True)],
        prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        sampled_logprobs=[np.zeros(len(solution), dtype=np.float32) for solution in solutions],
        reference_logprobs=None,
        advantages_N=np.zeros(count, dtype=np.float32),
        role_ids_N=np.array([role.number for role in roles], dtype=np.int8),
        group_ids_N=np.arange(count, dtype=np.int32),
        versions_N=np.zeros(count, dtype=np.int32),
    )


class SupervisedObjective:
    """The mean loss per solution token as the trainer's objective. The temperature is 1, as in the model itself."""

    def __init__(self, section: Training, pad_id: int) -> None:
        self._forward = ForwardSettings.of(section, 1.0, pad_id)
        self._max_rows = section.micro_batch_rollouts

    def prepare(self, batch: PolicyBatch) -> PolicyBatch:
        """Each token of the batch counts the same."""
        weight = 1.0 / float(batch.completion_lengths_N.sum())
        return batch.with_weights(np.full(len(batch), weight, dtype=np.float32))

    def split(self, batch: PolicyBatch) -> list[PolicyBatch]:
        """Micro-batches within the token budget. Raises ConfigurationError if a single row exceeds it."""
        parts = forward_batches(batch, np.arange(len(batch)), self._forward, self._max_rows)
        return [batch.select(part) for part in parts]

    def __call__(self, module: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        assert micro_batch.row_weights_N is not None, "prepare the batch before computing its loss"
        logprobs_BL = batch_logprobs(module, micro_batch, self._forward)
        weights_B = torch.from_numpy(micro_batch.row_weights_N).to(logprobs_BL.device)
        loss = -(logprobs_BL.sum(dim=1) * weights_B).sum()
        metrics = Metrics()
        tokens = int(micro_batch.completion_lengths_N.sum())
        metrics.add_mean("loss", -float(logprobs_BL.detach().double().sum()), tokens)
        metrics.add_sum("tokens", tokens)
        total = int(micro_batch.lengths_N.sum())
        positions = total if self._forward.shared_prompts else logprobs_BL.numel()  # shared: prompts once, no padding
        metrics.add_mean("padding", positions - total, positions)
        return loss, metrics

    def mean_loss(self, module: nn.Module, batch: PolicyBatch) -> float:
        """The loss of a whole batch without a gradient, in nats per token. Blocks."""
        found: list[Float32] = recompute_logprobs(module, batch, self._forward)
        return -float(np.concatenate(found).mean(dtype=np.float64))
