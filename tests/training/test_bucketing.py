"""Micro-batches of rows of like length: less padding than one for all, the same loss, gradient and log-probs."""

import numpy as np
import pytest
import torch
from table_policy import policy_batch, small_llama

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.losses import PolicyObjective


def mixed_batch():
    """48 rows, short and long ones in turns, with a reference and off policy."""
    random = np.random.default_rng(0)
    lengths = [int(random.integers(3, 8) if row % 2 else random.integers(24, 31)) for row in range(48)]
    sequences = [random.integers(3, 12, length) for length in lengths]
    logprobs = [random.normal(-2.4, 0.3, length - 2) for length in lengths]
    reference = [random.normal(-2.4, 0.3, length - 2) for length in lengths]
    groups = [row // 4 for row in range(48)]
    return policy_batch(
        sequences, [2] * 48, random.normal(0, 1, 48), groups=groups, sampled=logprobs, reference=reference
    )


def objective(loss="grpo", micro_batch_tokens=200, **others):
    how = {"micro_batch_tokens": micro_batch_tokens, "shared_prompts": False, **others}
    section = Training(loss=loss, kl={"coefficient": 0.1}, **how)
    return PolicyObjective(section, Rollouts(max_tokens=32), pad_id=0)


def trained_on(objective_, module, batch):
    """Loss and gradient over all micro-batches, and the positions that went through the model."""
    module.zero_grad()
    parts = objective_.split(objective_.prepare(batch))
    total = 0.0
    for part in parts:
        loss, _ = objective_(module, part)
        loss.backward()
        total += loss.item()
    gradient = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    return total, gradient, sum(len(part) * int(part.lengths_N.max()) for part in parts)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_loss_and_gradient_are_those_of_the_whole_batch_and_the_padding_is_not(loss):
    module, batch = small_llama(12), mixed_batch()
    found_loss, found, positions = trained_on(objective(loss), module, batch)
    whole_loss, whole, padded = trained_on(objective(loss, micro_batch_tokens=48 * 30), module, batch)
    assert padded == 48 * int(batch.lengths_N.max())  # one micro-batch
    assert found_loss == pytest.approx(whole_loss, rel=1e-5)
    assert float((found - whole).norm() / whole.norm()) < 1e-5
    assert padded > 1.4 * positions
