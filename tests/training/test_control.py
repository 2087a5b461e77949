"""The adaptive coefficient of the KL, by hand and in a trainer."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
import torch
from table_policy import TablePolicy
from test_policy_losses import PROBABILITIES, hand_batch, objective

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.losses import PolicyObjective, adapted_kl
from pvg.training.trainer import OptimizerSettings, Trainer


def test_the_kl_controller_by_hand() -> None:
    # 10 % over the target, horizon 10: 1 % more. Far over: an error of a fifth, 2 % more. Nothing at all: 2 % less.
    assert adapted_kl(0.5, kl=0.11, target=0.1, horizon=10.0) == pytest.approx(0.505)
    assert adapted_kl(0.5, kl=3.0, target=0.1, horizon=10.0) == pytest.approx(0.51)
    assert adapted_kl(0.5, kl=0.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=-1.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=0.1, target=0.1, horizon=10.0) == 0.5


def test_a_step_sees_what_the_step_before_measured() -> None:
    section = Training(kl={"coefficient": 0.1, "target": 0.1})
    control = PolicyObjective(section, Rollouts(), 0)
    assert control.kl == 0.1
    control.adapt({"kl": 1.0})  # too far from the base
    assert control.kl == pytest.approx(0.102)
    control.adapt({"kl": 0.0})
    assert control.kl == pytest.approx(0.09996)
    control.adapt({"skipped": 1.0})  # a batch without anything to learn from measures nothing
    assert control.kl == pytest.approx(0.09996)
    resumed = PolicyObjective(section, Rollouts(), 0)
    resumed.load_state(orjson.loads(orjson.dumps(control.state())))
    resumed.load_state({})  # of a run without a target
    assert PolicyObjective(Training(), Rollouts(), 0).state() == {}
    for each in (control, resumed):
        each.adapt({"kl": 0.2})
    assert control.state() == resumed.state()


class Endless:
    """The same batch again and again."""

    def __init__(self, batch):
        self._batch = batch

    async def next_batch(self):
        return self._batch


def adapting(kl_target):
    return {"kl": {"coefficient": 0.05, "target": kl_target}}


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
