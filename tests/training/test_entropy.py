"""The exact entropy in the policy's objective: its value and gradient by hand, in splits, and adapted in a trainer."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_policy import TablePolicy, policy_batch
from test_policy_losses import PROBABILITIES, evaluate, hand_batch, llama, objective, random_batch, random_policy

from pvg.models.logprobs import completion_outputs, shared_prompt_outputs
from pvg.training.trainer import OptimizerSettings, Trainer

__all__ = ["llama"]  # a fixture

FIRST = -sum(p * math.log(p) for p in PROBABILITIES[0])
SECOND = math.log(4)


def test_the_metric_by_hand():
    plain, gradient, metrics = evaluate(objective("grpo"), TablePolicy(PROBABILITIES), hand_batch())
    assert "entropy_exact" not in metrics
    total, found, metrics = evaluate(objective("grpo", entropy_bonus=1e-9), TablePolicy(PROBABILITIES), hand_batch())
    # A's tokens stand at positions 0 and 1, B's at 0.
    assert metrics["entropy_exact"] == pytest.approx((2 * FIRST + SECOND) / 3, rel=1e-5)
    assert total == pytest.approx(plain)
    torch.testing.assert_close(found, gradient)


def test_the_bonus_by_hand():
    # No advantages: the loss is -0.5 of the mean over tokens of H, whose derivative by logit v is -p_v (log p_v + H).
    batch = policy_batch([[0, 3, 1], [0, 2]], [1, 1], [0.0, 0.0])
    bonus = objective("reinforce_pp", entropy_bonus=0.5)
    total, gradient, _ = evaluate(bonus, TablePolicy(PROBABILITIES), batch)
    assert total == pytest.approx(-0.5 * (2 * FIRST + SECOND) / 3, rel=1e-5)
    expected = [0.5 * 2 / 3 * p * (math.log(p) + FIRST) for p in PROBABILITIES[0]]
    assert gradient[:4].tolist() == pytest.approx(expected, rel=1e-4)
    assert gradient[4:8].tolist() == pytest.approx([0.0] * 4, abs=1e-7)  # a uniform distribution is at the most


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_split_adds_up_to_the_unsplit_batch(seed, data):
    policy = random_policy(seed)
    batch = random_batch(policy, seed, 8, 5, 9)
    parts_N = np.array(data.draw(st.lists(st.integers(0, 4), min_size=8, max_size=8)))
    parts = [np.flatnonzero(parts_N == part) for part in np.unique(parts_N)]
    loss = data.draw(st.sampled_from(["grpo", "dapo", "dr_grpo", "rae"]))
    bonus = objective(loss, kl=0.1, max_tokens=9, entropy_bonus=0.3)
    whole, whole_gradient, whole_metrics = evaluate(bonus, policy, batch)
    split, split_gradient, split_metrics = evaluate(bonus, policy, batch, parts)
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert (split_gradient - whole_gradient).norm() <= 2e-6 * max(0.1, whole_gradient.norm())
    assert split_metrics["entropy_exact"] == pytest.approx(whole_metrics["entropy_exact"], rel=1e-5)


def test_both_forward_passes_of_a_transformer_agree_with_its_own_logits(llama):
    rows = [np.array(row, dtype=np.int32) for row in ([1, 2, 3, 4, 0], [1, 2, 3, 2], [4, 4, 1, 0, 2])]
    prompts = np.array([2, 2, 3])
    ids_BL, lengths_B = torch.zeros((3, 5), dtype=torch.int64), torch.tensor([5, 4, 5])
    for number, row in enumerate(rows):
        ids_BL[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    starts_B = torch.from_numpy(prompts)
    how = {"temperature": 0.7, "entropies": True, "logits_chunk": 10}
    packed = shared_prompt_outputs(llama, rows, prompts, **how)
    padded = completion_outputs(llama, ids_BL, lengths_B, starts_B, **how)
    logprobs_BLV = (llama(input_ids=ids_BL).logits.float() / 0.7).log_softmax(-1)
    wanted_BL = torch.zeros(3, 5)
    for row in range(3):
        for t in range(int(prompts[row]), int(lengths_B[row])):
            all_V = logprobs_BLV[row, t - 1]
            wanted_BL[row, t] = -(all_V.exp() * all_V).sum()
    torch.testing.assert_close(packed.entropies_BL, wanted_BL, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded.entropies_BL, wanted_BL, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.logprobs_BL, padded.logprobs_BL, rtol=1e-4, atol=1e-5)


class Endless:
    """The same batch again and again."""

    def __init__(self, batch):
        self._batch = batch

    async def next_batch(self):
        return self._batch


def adapting(kl_target):
    return {"kl": {"coefficient": 0.05, "target": kl_target}, "entropy_bonus": 0.01}


def trainer(steps, executor, **settings_):
    """After `steps` steps on the batch by hand, with a reference, and what they reported."""
    batch = hand_batch([[-1.0, -2.0], [-0.5]])
    found = Trainer(
        TablePolicy(PROBABILITIES),
        objective("grpo", **({"kl": 0.05} | settings_)),
        OptimizerSettings(learning_rate=0.1),
        Endless(batch),
        executor=executor,
    )
    return found, [asyncio.run(found.step()).metrics for _ in range(steps)]


def test_a_trainers_coefficient_follows_what_its_steps_measure_and_resume():
    adapted = adapting(1e-3)
    with ThreadPoolExecutor(1) as executor:
        _, fixed = trainer(2, executor)
        assert "kl_coefficient" not in fixed[0]
        whole, metrics = trainer(6, executor, **adapted)
        assert metrics[0]["kl_coefficient"] == 0.05
        assert metrics[1]["kl_coefficient"] == pytest.approx(0.05 * 1.02)  # far over the target
        first, _ = trainer(3, executor, **adapted)
        resumed, _ = trainer(0, executor, **adapted)
        resumed.load_state(*first.state())
        again = [asyncio.run(resumed.step()).metrics for _ in range(3)]
        assert again == metrics[3:]
        for name, tensor in whole.state()[0].items():
            assert torch.equal(tensor, resumed.state()[0][name])
