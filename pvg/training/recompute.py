"""Log-probs of a batch's completions by a second forward pass: for the reference policy of the KL, and for
`rollout.logprobs = "recomputed"`, where the trainer's own numbers stand in for the sampler's."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pvg.records import Float32
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, batch_logprobs, forward_batches
from pvg.training.precision import autocast


def recompute_logprobs(module: nn.Module, batch: PolicyBatch, settings: ForwardSettings) -> list[Float32]:
    """Log-probs, in nats, of each row's completion tokens under `module`: float32 [C] per row, in the batch's order.

    No gradients. Blocks: call it in the executor that the trainer uses. Raises ConfigurationError when a row is longer
    than the token budget.
    """
    device = next(module.parameters()).device
    found: list[Float32] = [np.zeros(0, dtype=np.float32)] * len(batch)
    with torch.no_grad(), autocast(settings.precision, device):
        for rows in forward_batches(batch, np.arange(len(batch)), settings):
            part = batch.select(rows)
            flat = batch_logprobs(module, part, settings).cpu().numpy()[part.completion_mask()]
            for row, values in zip(rows, np.split(flat, np.cumsum(part.completion_lengths_N)[:-1]), strict=True):
                found[row] = values
    return found
