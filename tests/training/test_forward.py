"""Which rows a forward pass computes: rows of the same tokens once, and what that changes of losses and budgets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_policy import policy_batch
from test_policy_losses import llama

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, recompute_logprobs
from pvg.training.losses import PolicyObjective

__all__ = ["llama"]  # a fixture

# Rows 0, 2 and 5 are the same; row 4 has the tokens of row 3 with another prompt length.
SEQUENCES = [[3, 1, 4, 1, 0], [3, 1, 2, 2], [3, 1, 4, 1, 0], [4, 0, 3, 0], [4, 0, 3, 0], [3, 1, 4, 1, 0]]
PROMPTS = [2, 2, 2, 1, 2, 2]
COMPUTED = 2 + 6  # prompts 31, 40; completions 41, 2, 3 (the last token predicts none) and


def repeated_batch() -> PolicyBatch:
    generator = np.random.default_rng(0)
    sampled = [generator.normal(-2.0, 0.3, len(row) - start) for row, start in zip(SEQUENCES, PROMPTS, strict=True)]
    reference = [row + generator.normal(0.0, 0.3, len(row)) for row in sampled]
    return policy_batch(
        SEQUENCES, PROMPTS, [1.0, -1.0, 0.5, 2.0, -0.5, -2.0], groups=[0] * 6, sampled=sampled, reference=reference
    )


def computed(model: torch.nn.Module, shares: bool, batch: PolicyBatch) -> tuple[float, torch.Tensor, list[int]]:
    """Loss, gradient, and how many tokens each forward pass embedded."""
    section = Training(kl={"coefficient": 0.1}, shared_prompts=shares)
    objective = PolicyObjective(section, Rollouts(max_tokens=8), pad_id=0)
    model.zero_grad()
    objective(model, objective.prepare(batch))  # the checks of a model, which come once, embed tokens too
    seen: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    total = 0.0
    for part in objective.split(objective.prepare(batch)):
        loss, _ = objective(model, part)
        loss.backward()
        total += loss.item()
    hook.remove()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), seen


def test_rows_of_the_same_tokens_are_computed_once_and_learn_as_if_they_were_not(llama):
    batch = repeated_batch()
    loss, gradient, tokens = computed(llama, True, batch)
    expected_loss, expected, padded_tokens = computed(llama, False, batch)
    assert tokens == [COMPUTED]
    assert sum(padded_tokens) == 6 * 5
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_reference_computes_them_once_too_and_gives_each_row_its_own(llama):
    batch = repeated_batch()
    limits = ForwardSettings(1.0, 100, 0)
    expected = recompute_logprobs(llama, batch, replace(limits, shared_prompts=False))
    seen: list[int] = []
    hook = llama.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    found = recompute_logprobs(llama, batch, limits)
    hook.remove()
    assert seen[-1] == COMPUTED
    for row, logprobs in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, logprobs, rtol=1e-4, atol=1e-5)
