"""Log-probs of a batch's completions by a second forward pass: for the reference policy of the KL, and for
`rollout.logprobs = "recomputed"`, where the trainer's own numbers stand in for the sampler's."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pvg.models.logprobs import DEFAULT_LOGITS_CHUNK, completion_logprobs
from pvg.models.padding import pad_right, token_budget_batches
from pvg.records import Float32
from pvg.training.batch import PolicyBatch
from pvg.training.precision import autocast


def recompute_logprobs(
    module: nn.Module,
    batch: PolicyBatch,
    *,
    temperature: float,
    token_budget: int,
    pad_id: int,
    logits_chunk: int = DEFAULT_LOGITS_CHUNK,
    precision: str = "float32",
    bucketing: bool = True,
) -> list[Float32]:
    """Log-probs, in nats, of each row's completion tokens under `module`: float32 [C] per row, in the batch's order.

    No gradients; forward passes of at most `token_budget` tokens, padding included, of rows of like length where
    `bucketing`. Blocks: call it in the executor that the trainer uses. Raises ConfigurationError when a row is longer
    than the budget.
    """
    device = next(module.parameters()).device
    found: list[Float32] = [np.zeros(0, dtype=np.float32)] * len(batch)
    with torch.no_grad(), autocast(precision, device):
        for rows in token_budget_batches(batch.lengths_N, token_budget, by_length=bucketing):
            part = batch.select(rows)
            ids_BL, lengths_B = pad_right(part.sequences, pad_id, device)
            prompt_lengths_B = torch.from_numpy(part.prompt_lengths.astype(np.int64)).to(device)
            logprobs_BL = completion_logprobs(
                module, ids_BL, lengths_B, prompt_lengths_B, temperature=temperature, logits_chunk=logits_chunk
            )
            flat = logprobs_BL.cpu().numpy()[part.completion_mask()]
            for row, values in zip(rows, np.split(flat, np.cumsum(part.completion_lengths_N)[:-1]), strict=True):
                found[row] = values
    return found
