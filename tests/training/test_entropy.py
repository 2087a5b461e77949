"""The exact entropy in the policy's objective: its value and gradient by hand, and adapted in a trainer."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from table_policy import TablePolicy, policy_batch
from test_policy_losses import PROBABILITIES, evaluate, hand_batch, objective

from pvg.training.trainer import OptimizerSettings, Trainer

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
